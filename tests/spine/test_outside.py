"""A service with keys and TLS, seen by somebody who has none of them: every port that any of its processes listens on
turns him away, and goes on for the others. No key is shown anywhere."""

import json
import secrets
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from typer.testing import CliRunner

from baton import Client
from baton.cli.app import app
from baton.cli.terminal.exit_codes import ExitCode
from baton_proto.generated import inference_pb2 as pb, inference_pb2_grpc as pb_grpc
from baton_proto.worker import DRAIN, INSPECT, MAJOR, SLEEP, DrainRequest, InspectRequest, SleepRequest, encode
from kvtransfer.wire.proving import prove
from runtime.errors import ConfigError, ProtocolError
from runtime.security.cluster_key import NATS, OPERATOR, WORKER_CALLS, new_cluster_key
from runtime.security.handshake import KV_PLANE, STREAM_PLANE, dialing
from tests.spine.guarded import Guarded, guarded_service, listening

LIMIT_S = 60.0  # in which a silent stranger is left; the limits themselves are 2 to 10 s
MUTE_KINDS = ("stream", "kv")  # they say nothing before they know who is there
SAID = {
    "silence": b"",
    "half a TLS hello": b"\x16\x03\x01",
    "half a request": b"GET / HTTP/1.0\r\n",
    "noise": secrets.token_bytes(4000),
    "zeros": bytes(4000),
}
CHAT = {"model": "mock", "messages": [{"role": "user", "content": "Who is there?"}], "max_tokens": 8}
STRANGE = new_cluster_key()

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded_service(tmp_path_factory.mktemp("guarded")) as service:
        yield service


def test_every_port_is_known_here_and_bound_to_the_loopback_interface(service: Guarded) -> None:
    """A port that is new has to be added to this file, and with it what strangers find there."""
    found = [address for process in service.processes() for address in listening(process)]
    assert {ip.removeprefix("::ffff:") for ip, _ in found} == {"127.0.0.1"}
    assert {port for _, port in found} == set(service.kinds)
    expected = ["grpc", "http", "kv", "metrics", "metrics", "metrics", "nats", "rpc", "rpc", "stream", "stream"]
    assert sorted(service.kinds.values()) == expected


def test_who_says_nothing_or_nonsense_is_left_and_the_service_goes_on(service: Guarded) -> None:
    def visit(case: tuple[int, str, str]) -> None:
        port, kind, what = case
        heard = b""
        with socket.create_connection(("127.0.0.1", port), LIMIT_S) as stranger:
            try:
                stranger.sendall(SAID[what])
                while data := stranger.recv(65536):
                    heard += data
            except ConnectionError:
                pass
            except TimeoutError:
                raise AssertionError(f"{what}: {kind} still listens, having said {heard!r}") from None
        assert kind not in MUTE_KINDS or heard == b"", what
        assert b"200 OK" not in heard

    cases = [(port, kind, what) for port, kind in service.kinds.items() for what in SAID]
    with ThreadPoolExecutor(len(cases)) as pool:
        list(pool.map(visit, cases))
    assert service.ask().returncode == 0


@pytest.mark.parametrize("wrong", [None, STRANGE.derive(WORKER_CALLS).reveal()], ids=["no key", "a wrong key"])
def test_who_has_no_key_or_a_wrong_one_is_refused_at_every_port(service: Guarded, wrong: str | None) -> None:
    for port, kind in service.kinds.items():
        VISITS[kind](service, port, wrong)
    assert service.ask().returncode == 0


def test_a_key_that_opens_one_door_opens_no_other(service: Guarded) -> None:
    cluster, operator = service.cluster, service.cluster.derive(OPERATOR).reveal()
    keys = (service.api_key, operator, cluster.secret.reveal(), cluster.derive(NATS).reveal())
    wrong = [("rpc", key) for key in keys]
    wrong += [("http", operator), ("nats", operator), ("grpc", cluster.derive(WORKER_CALLS).reveal())]
    with ThreadPoolExecutor() as pool:  # after ten wrong keys each refusal takes a second
        visits = [pool.submit(VISITS[kind], service, port, key) for kind, key in wrong for port in service.ports(kind)]
        (port,) = service.ports("grpc")
        with grpc.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(service.ca)) as channel:
            refused(pb_grpc.InferenceStub(channel).ListModels, pb.ListModelsRequest(), operator)
            refused(pb_grpc.AdminStub(channel).Sleep, pb.SleepRequest(worker_id="decode-1"), service.api_key)
            refused(pb_grpc.AdminStub(channel).Status, pb.StatusRequest(), service.api_key)
    for visit in visits:
        visit.result()


def visit_grpc(service: Guarded, port: int, key: str | None) -> None:
    with grpc.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(service.ca)) as channel:
        inference, admin = pb_grpc.InferenceStub(channel), pb_grpc.AdminStub(channel)
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        names = reflection_pb2.ServerReflectionRequest(list_services="")
        refused(inference.Generate, pb.GenerateRequest(text="a"), key)
        refused(inference.ListModels, pb.ListModelsRequest(), key)
        refused(admin.Status, pb.StatusRequest(), key)
        refused(admin.Sleep, pb.SleepRequest(worker_id="decode-1"), key)
        refused(admin.Wake, pb.WakeRequest(worker_id="decode-1"), key)
        refused(reflection.ServerReflectionInfo, iter([names]), key)
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
        assert health.status == health_pb2.HealthCheckResponse.SERVING


def visit_rpc(service: Guarded, port: int, key: str | None) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        refused(channel.unary_unary(INSPECT.method, encode), InspectRequest(MAJOR), key)
        refused(channel.unary_unary(SLEEP.method, encode), SleepRequest(MAJOR, 1, 1.0), key)
        refused(channel.unary_unary(DRAIN.method, encode), DrainRequest(MAJOR, 1.0), key)


def refused(method: Any, request: Any, key: str | None) -> None:
    metadata = [] if key is None else [("authorization", f"Bearer {key}")]
    with pytest.raises(grpc.RpcError) as caught:
        list(method(request, timeout=LIMIT_S, metadata=metadata))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]


def visit_http(service: Guarded, port: int, key: str | None) -> None:
    with httpx.Client(verify=service.trust, headers=header(key), base_url=f"https://127.0.0.1:{port}") as client:
        for path in ("/metrics", "/v1/models", "/"):
            assert client.get(path).status_code == 401, path
        answer = client.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


def visit_metrics(service: Guarded, port: int, key: str | None) -> None:
    for path in ("/metrics", "/"):
        assert httpx.get(f"http://127.0.0.1:{port}{path}", headers=header(key)).status_code == 401


def header(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def visit_nats(service: Guarded, port: int, key: str | None) -> None:
    login = {} if key is None else {"user": "baton", "pass": key}
    with socket.create_connection(("127.0.0.1", port), LIMIT_S) as stranger:
        stranger.sendall(f"CONNECT {json.dumps(login)}\r\nSUB > 1\r\nPING\r\n".encode())
        heard = b"".join(iter(lambda: stranger.recv(65536), b""))
    assert b"Authorization Violation" in heard
    assert b"PONG" not in heard


def visit_stream(service: Guarded, port: int, key: str | None) -> None:
    visit_mute(port, STREAM_PLANE)


def visit_kv(service: Guarded, port: int, key: str | None) -> None:
    visit_mute(port, KV_PLANE)


def visit_mute(port: int, plane: bytes) -> None:
    with (
        socket.create_connection(("127.0.0.1", port), LIMIT_S) as stranger,
        pytest.raises((OSError, ProtocolError)),
    ):
        prove(stranger, dialing(STRANGE, plane, "it"), LIMIT_S)


VISITS: dict[str, Callable[[Guarded, int, str | None], None]] = {
    "grpc": visit_grpc,
    "http": visit_http,
    "kv": visit_kv,
    "metrics": visit_metrics,
    "nats": visit_nats,
    "rpc": visit_rpc,
    "stream": visit_stream,
}


def test_who_has_the_key_is_served_over_tls(service: Guarded) -> None:
    answer = json.loads(service.ask().stdout)
    assert answer["served_by"][0]["kv_blocks"] > 0, "the prompt was not shipped"
    with httpx.Client(verify=service.trust, base_url=service.url) as client:
        assert [client.get(path).status_code for path in ("/health", "/ready")] == [200, 200]
        client.headers = header(service.api_key)
        assert client.get("/v1/models").json()["data"][0]["id"] == "mock"
        assert client.get("/metrics").status_code == 200
        with client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as response:
            assert response.read().endswith(b"data: [DONE]\n\n")
    for port in service.ports("metrics"):
        assert httpx.get(f"http://127.0.0.1:{port}/metrics", headers=header(service.api_key)).status_code == 200


def test_commands_on_the_same_machine_need_no_set_up_for_nats(service: Guarded) -> None:
    url = f"nats://127.0.0.1:{service.ports('nats')[0]}"
    assert service.target(url)["decode"] == 1
    lag = service.run("events", "lag", "--json", "--nats-url", url)
    assert lag.returncode == 0, lag.stderr
    stranger = {"XDG_RUNTIME_DIR": str(service.folder / "logs")}
    elsewhere = service.run("plan", "--nats-url", url, **stranger)
    assert (elsewhere.returncode, elsewhere.stdout) == (ExitCode.USAGE, "")
    assert "BATON_CLUSTER_KEY" in elsewhere.stderr
    told = service.run("plan", "--nats-url", url, **stranger, BATON_CLUSTER_KEY=service.cluster.secret.reveal())
    assert told.returncode == 0


def test_a_command_says_what_its_key_or_its_ca_lacks(service: Guarded) -> None:
    foreign = service.folder / "foreign.pem"
    trustme.CA().cert_pem.write_to_path(foreign)
    own = service.folder / "baton" / "default" / "operator.key"
    key, trust = ["--operator-key-file", str(own)], service.flags[2:]
    cases: list[tuple[list[str], dict[str, str], str]] = [
        (trust, {}, "the operator key is missing"),
        (trust, {"BATON_OPERATOR_KEY": "wrong"}, "this is not the operator key"),
        (trust, {"BATON_API_KEY": service.api_key}, "the operator key is missing"),
        ([*trust, "--operator-key-file", "/nowhere"], {}, "--operator-key-file: /nowhere: No such file"),
        (key, {}, "speaks TLS; name its CA with --ca-file or BATON_CA_FILE"),
        ([*key, "--ca-file", str(foreign)], {}, "a certificate that --ca-file does not vouch for"),
        ([*key, "--ca-file", "/nowhere"], {}, "--ca-file: /nowhere: No such file"),
        ([*key, "--ca-file", str(service.folder / "api")], {}, "holds no certificate in PEM form"),
        ([*key, *trust, "--address", f"127.0.0.1:{service.ports('rpc')[0]}"], {}, "does not speak TLS"),
    ]

    status = ["status", "--address", service.grpc_address]
    for flags, variables, words in cases:
        result = CliRunner(env=variables).invoke(app, [*status, *flags])
        assert (result.exit_code, result.stdout) == (ExitCode.USAGE, ""), words
        assert words in result.stderr
    assert CliRunner(env={"BATON_OPERATOR_KEY": own.read_text()}).invoke(app, [*status, *trust]).exit_code == 0
    for variables, words in (({}, "the API key is missing"), ({"BATON_API_KEY": "wrong"}, "this is not the API key")):
        asked = CliRunner(env=variables).invoke(app, ["chat", "hi", "--address", service.grpc_address, *trust])
        assert (asked.exit_code, asked.stdout) == (ExitCode.USAGE, "")
        assert f"{words} (metadata authorization: Bearer KEY); give it with --api-key-file" in asked.stderr


def test_a_program_is_let_in_with_a_key_and_the_ca(service: Guarded) -> None:
    ca, operator = service.folder / "ca.pem", (service.folder / "baton" / "default" / "operator.key").read_text()
    with Client(service.grpc_address, service.api_key, ca, operator) as client:
        assert client.chat("Who is there?", max_tokens=4, ignore_eos=True).usage.completion_tokens == 4
        assert client.status().router_id == "router-1"
    with Client(service.grpc_address) as stranger, pytest.raises(ConfigError, match="speaks TLS; name its CA with"):
        stranger.models()


def test_a_benchmark_is_let_in_with_a_key_and_the_ca(service: Guarded) -> None:
    load = ["bench", "--address", service.url, "-n", "3", "--prompt-tokens", "20", "--output-tokens", "4", "--json"]
    done = CliRunner().invoke(app, [*load, *service.flags])
    assert (done.exit_code, json.loads(done.stdout)["points"][0]["requests"]) == (0, 3)
    for flags, words in (
        (service.flags[:2], "a certificate that --ca-file does not"),
        (service.flags[2:], "answers 401: "),
    ):
        refused = CliRunner().invoke(app, [*load, *flags])
        assert (refused.exit_code, words in refused.stderr) == (ExitCode.UNAVAILABLE, True)


def test_no_key_is_shown(service: Guarded) -> None:
    """In logs, on standard output, in `status`, in the configuration of the children, in any command line."""
    assert service.ask().returncode == 0
    status = service.run("status", "--json", *service.flags[2:])
    shown = [json.dumps(service.lines), status.stdout]
    shown += [path.read_text() for path in (*(service.folder / "logs").iterdir(), service.folder / "up.log")]
    shown += ["\n".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    router = next(process for process in service.processes() if "router" in process.cmdline())
    shown.append(Path(router.cmdline()[router.cmdline().index("--config") + 1]).read_text())
    assert "decode-1" in "".join(shown[1:])
    kept = [service.cluster.secret, *(service.cluster.derive(purpose) for purpose in (NATS, WORKER_CALLS, OPERATOR))]
    for key in [*(secret.reveal() for secret in kept), *(service.folder / "api").read_text().split()]:
        assert not [text for text in shown if key in text]
