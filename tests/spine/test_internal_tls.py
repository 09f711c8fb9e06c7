"""`baton up` with `security.internal_tls: on`: it serves, commands find their way in, and who has no certificate
of the cluster is told nothing at any of its inner ports."""

import json
import socket
import ssl
from collections.abc import Iterator

import pytest

from runtime.security.cluster_key import ClusterKey
from tests.spine.guarded import Guarded, guarded_service

LIMIT_S = 60.0
INNER = ("rpc", "stream", "kv", "nats")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded_service(tmp_path_factory.mktemp("secured"), internal_tls=True) as service:
        yield service


def test_a_prompt_is_shipped_and_answered(service: Guarded) -> None:
    answer = json.loads(service.ask().stdout)
    assert answer["served_by"][0]["transport"] == "tcp"
    assert answer["served_by"][0]["kv_blocks"] > 0


def test_commands_of_the_same_user_need_no_set_up(service: Guarded) -> None:
    url = f"tls://127.0.0.1:{service.ports('nats')[0]}"
    assert url in json.dumps(service.lines)
    assert service.target(url)["decode"] == 1
    recorded = service.run("events", "record", str(service.folder / "events"), "--for", "2", "--nats-url", url)
    assert recorded.returncode == 0, recorded.stderr
    diff = service.run("events", "diff", "--json", "--address", service.grpc_address, *service.flags[2:])
    assert diff.returncode == 0, diff.stderr + diff.stdout


def test_the_ca_of_the_run_is_the_one_that_the_cluster_key_makes(service: Guarded) -> None:
    left = (service.folder / "baton" / "default" / "ca.pem").read_text()
    tls = ClusterKey(service.cluster.secret, "on").tls
    assert tls is not None
    trusting = ssl.create_default_context(cadata=left)
    trusting.minimum_version = ssl.TLSVersion.TLSv1_3
    port = service.ports("stream")[0]
    with (
        socket.create_connection(("127.0.0.1", port), LIMIT_S) as plain,
        trusting.wrap_socket(plain, server_hostname=tls.name) as secured,
    ):
        assert secured.version() == "TLSv1.3"


@pytest.mark.parametrize("shows", ["nothing", "a certificate of another cluster", "no TLS"])
def test_who_is_not_of_the_cluster_hears_nothing(service: Guarded, shows: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if shows == "a certificate of another cluster":
        tls = ClusterKey(type(service.cluster.secret)("x" * 40), "on").tls
        assert tls is not None
        tls.pair().load_into(context)
    for port in service.ports(*INNER):
        heard = b""
        with socket.create_connection(("127.0.0.1", port), LIMIT_S) as plain:
            try:
                with plain if shows == "no TLS" else context.wrap_socket(plain) as stranger:
                    stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nCONNECT {}\r\nPING\r\n")
                    while data := stranger.recv(65536):
                        heard += data
            except TimeoutError:
                raise AssertionError(f"{service.kinds[port]} still listens") from None
            except OSError:
                pass  # it hung up
        alert = heard[:1] == b"\x15" and len(heard) <= 16  # of TLS, in plain text: that this is none
        assert heard == b"" or alert, (service.kinds[port], heard)
    assert service.ask().returncode == 0
