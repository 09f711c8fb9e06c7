"""The command line: usage errors, exit codes, and the commands against a real service."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio
from typer.testing import CliRunner

from baton.cli.app import app
from baton.cli.terminal.exit_codes import ExitCode
from baton.cli.terminal.output import human_bytes
from tests.hub_server import hub_server
from tests.service import Service, assert_gone, running_service

BATON = [sys.executable, "-m", "baton"]
NOBODY = "127.0.0.1:1"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fly"], "No such command"),
        (["up", "--http-port", "70000"], "--http-port"),
        (["up", "--prefill", "-1"], "--prefill"),
        (["up", "--set", "transfer.transport=pigeon"], "pigeon"),
        (["up", "--set", "transfer"], "--set: 'transfer' is not KEY=VALUE such as engine.block_size=32"),
        (["up", "--set", "engine.blocksize=32"], "flags: engine.blocksize: unknown key; the nearest known one is"),
        (["up", "--block-size", "32"], "--set engine.block_size=32"),
        (["up", "--kv-memory=4GiB"], "--set engine.kv_memory=4GiB"),
        (["up", "--insecure", "--json"], "--set security.insecure=true"),
        (["up", "--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["up", "--config", "/nowhere.yaml"], "/nowhere.yaml: No such file"),
        (["chat", "hi", "--max-tokens", "0"], "--max-tokens"),
        (
            ["wake", "decode-1", "--address", NOBODY, "--tags", "kv_cache,zz"],
            "--tags: 'zz' is none of weights, kv_cache",
        ),
        (["generate"], "--prompt"),
        (["generate", "--prompt", "a", "--tokens", "1"], "--prompt"),
        (["generate", "a", "--tokens", "1"], "--tokens"),
        (["status", "--address", "garbage"], "--address or --service: no service 'garbage'"),
        (["events", "lag", "--nats-url", "garbage"], "--nats-url or --service: no service 'garbage'"),
        (["events", "lag", "--nats-url", "http://x"], "--nats-url: http:// is no way to a NATS server"),
        (["generate", "--tokens", "1,x"], "1,x"),
        (["generate", "--tokens", "1,-2"], "4294967295"),
        (["generate", "--prompt", "a", "--logprobs", "21"], "--logprobs"),
        (["events", "tree", "--address", NOBODY, "--hottest", "5000000000"], "--hottest"),
        (["events", "tree", "--address", NOBODY, "--max-runs", "5000000000"], "--max-runs"),
        (["events", "diff", "--address", NOBODY, "--blocks", "5000000000"], "--blocks"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_is_wrong(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == ExitCode.USAGE
    assert words in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("command", [["chat", "hi"], ["generate", "--prompt", "a"], ["status"]])
def test_no_service_at_the_address_ends_with_3(command: list[str]) -> None:
    result = run(*command, "--address", NOBODY)
    assert result.exit_code == ExitCode.UNAVAILABLE
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr


def test_bytes_are_written_for_people() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1536, 5 * 2**20, 3 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 GiB",
    ]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def service(tiny_model: Path) -> AsyncIterator[Service]:
    async with running_service(tiny_model, router={"placement": {"local_prefill_tokens": 0}}) as service:
        yield service


async def baton(service: Service, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The real program, while the service's own event loop goes on."""
    process = await asyncio.create_subprocess_exec(
        *BATON,
        *arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"BATON_ADDRESS": service.grpc_address},
    )
    stdout, stderr = await process.communicate()
    return subprocess.CompletedProcess(arguments, process.returncode or 0, stdout.decode(), stderr.decode())


class TestAgainstAService:
    pytestmark = pytest.mark.asyncio(loop_scope="module")

    async def test_generate_prints_the_text(self, service: Service) -> None:
        arguments = ("generate", "--prompt", "The capital of", "-t", "0", "--max-tokens", "12", "--ignore-eos")
        text = await baton(service, *arguments)
        as_json = await baton(service, *arguments, "--json")
        assert (text.returncode, as_json.returncode) == (0, 0)
        answer = json.loads(as_json.stdout)
        assert text.stdout == answer["text"] + "\n"
        assert len(answer["token_ids"]) == 12
        assert answer["finish_reason"] == "length"

    async def test_the_json_answer_tells_usage_and_who_served(self, service: Service) -> None:
        tokens = ",".join(str(3 + i) for i in range(40))
        result = await baton(
            service, "generate", "--tokens", tokens, "--max-tokens", "3", "--ignore-eos", "--logprobs", "2", "--json"
        )
        answer = json.loads(result.stdout)
        assert answer["usage"]["prompt_tokens"] == 40
        assert answer["usage"]["completion_tokens"] == 3
        (served,) = answer["served_by"]
        assert (served["prefill_worker"], served["decode_worker"]) == ("prefill-1", "decode-1")
        assert served["kv_blocks"] == 3
        assert served["kv_bytes"] > 0
        assert [len(token["top"]) for token in answer["logprobs"]] == [2, 2, 2]

    async def test_chat_asks_through_the_chat_template(self, service: Service) -> None:
        result = await baton(service, "chat", "Who?", "--system", "Be short.", "-t", "0", "--max-tokens", "5", "--json")
        assert result.returncode == 0
        answer = json.loads(result.stdout)
        bare = json.loads((await baton(service, "generate", "-p", "Who?", "--max-tokens", "5", "--json")).stdout)
        assert answer["usage"]["prompt_tokens"] > bare["usage"]["prompt_tokens"] + 5

    async def test_the_same_seed_gives_the_same_text(self, service: Service) -> None:
        arguments = ("generate", "-p", "Once", "--seed", "7", "--max-tokens", "20", "--ignore-eos", "--json")
        first, second = [json.loads((await baton(service, *arguments)).stdout) for _ in range(2)]
        assert first["token_ids"] == second["token_ids"]

    @pytest.mark.parametrize(
        ("arguments", "code", "words"),
        [
            (["-p", "a", "--model", "gpt-17"], ExitCode.USAGE, "gpt-17"),
            (["-p", "a", "--temperature", "9"], ExitCode.USAGE, "temperature"),
            (["--tokens", "100000"], ExitCode.USAGE, "100000"),
            (["--tokens", ""], ExitCode.USAGE, "empty"),
            (["-p", "a", "--timeout", "0.005", "--ignore-eos"], ExitCode.DEADLINE, ""),
        ],
    )
    async def test_a_refused_request_ends_with_its_code(
        self, service: Service, arguments: list[str], code: ExitCode, words: str
    ) -> None:
        result = await baton(service, "generate", *arguments)
        assert result.returncode == code
        assert result.stderr.startswith("error: ")
        assert words in result.stderr
        assert "Traceback" not in result.stderr

    async def test_status_shows_every_worker(self, service: Service) -> None:
        table = await baton(service, "status")
        for words in ("prefill-1", "decode-1", "ready", "queue: 0 running, 0 waiting"):
            assert words in table.stdout
        fields = json.loads((await baton(service, "status", "--json")).stdout)
        assert {worker["worker_id"] for worker in fields["workers"]} == {"prefill-1", "decode-1"}
        assert all(isinstance(worker["incarnation"], int) for worker in fields["workers"])
        assert fields["queue"]["capacity"] > 0


@contextmanager
def baton_up(
    model: Path | str, *arguments: str
) -> Iterator[tuple["subprocess.Popen[str]", list[dict[str, Any]], set[int]]]:
    """`baton up` on free ports, once it serves; with the lines that it printed and the processes that it started."""
    ports = ["--set", "router.grpc_port=0", "--http-port", "0"]
    command = [*BATON, "up", "--json", "--model", str(model), *ports, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        try:
            for line in process.stdout:
                lines.append(json.loads(line))
                if lines[-1]["event"] == "serving":
                    break
            else:
                raise AssertionError(process.stderr.read() if process.stderr else "")
            pids = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
            yield process, lines, pids
        finally:
            process.kill()
    assert_gone(pids)


def test_up_tells_every_process_and_a_signal_ends_all_with_0(tiny_model: Path) -> None:
    with baton_up(tiny_model) as (process, lines, pids):
        chosen = lines[0]
        assert (chosen["event"], chosen["device"], chosen["dtype"], chosen["block_size"]) == (
            "engine",
            "cpu",
            "float32",
            16,
        )
        assert {line.get("id") for line in lines} >= {"nats", "router-1", "prefill-1", "decode-1"}
        assert {line["pid"] for line in lines if line["event"] == "ready"} <= pids
        assert lines[-1]["grpc"].startswith("127.0.0.1:")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == ExitCode.OK
        assert not any(psutil.pid_exists(pid) for pid in pids)


def test_up_downloads_a_model_once_serves_it_by_its_name_and_leaves_nothing_when_it_is_killed(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_server("acme/tiny-llama", tiny_model) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        with baton_up("acme/tiny-llama") as (process, lines, pids):
            models = httpx.get(f"http://{lines[-1]['http']}/v1/models").json()["data"]
            assert [model["id"] for model in models] == ["acme/tiny-llama"]
            nothing_outlives_it_when_it_is_killed(process, pids)
    assert hub.downloads("model.safetensors") == [""]


def nothing_outlives_it_when_it_is_killed(up: "subprocess.Popen[str]", pids: set[int]) -> None:
    assert len(pids) == 5  # NATS, router, its helper for grammars, prefill and decode worker
    up.kill()
    up.wait(60)
    assert_gone(pids, timeout_s=60)


def test_nothing_outlives_an_up_that_is_killed_while_it_starts(tiny_model: Path) -> None:
    command = [*BATON, "up", "--model", str(tiny_model), "--set", "router.grpc_port=0", "--http-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while len(children := psutil.Process(process.pid).children()) < 4:
            assert process.poll() is None
        process.kill()
    assert_gone(child.pid for child in children)


def test_a_lost_worker_is_told_and_the_rest_serves_on() -> None:
    each_its_own_process = ("--set", "workers.per_process=1")
    with baton_up("mock", "--prefill", "0", "--decode", "baton=2", *each_its_own_process) as (process, lines, _):
        pids = {line["id"]: line["pid"] for line in lines if line["event"] == "ready"}
        assert process.stdout is not None
        os.kill(pids["decode-1"], signal.SIGKILL)
        lost = json.loads(process.stdout.readline())
        assert (lost["event"], lost["id"], lost["goes_on"]) == ("lost", "decode-1", True)
        os.kill(pids["decode-2"], signal.SIGKILL)
        lost = json.loads(process.stdout.readline())
        assert (lost["id"], lost["goes_on"]) == ("decode-2", False)
        assert process.wait(60) == ExitCode.FAILED


def test_a_second_signal_does_not_wait_for_requests() -> None:
    with baton_up("mock", "--prefill", "0") as (process, lines, pids):
        command = [*BATON, "generate", "--tokens", "5,6,7", "--max-tokens", "4000", "--ignore-eos", "--json"]
        with subprocess.Popen(
            [*command, "--address", lines[-1]["grpc"]], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as request:
            until_running(lines[-1]["grpc"])
            process.send_signal(signal.SIGINT)
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["event"] == "draining"
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == ExitCode.FAILED
            assert request.wait(60) == ExitCode.UNAVAILABLE
            assert request.stderr is not None
            assert b"error: " in request.stderr.read()
        assert_gone(pids)


def test_demo_asks_ships_and_ends(tiny_model: Path) -> None:
    result = subprocess.run(
        [*BATON, "demo", "--model", str(tiny_model)], capture_output=True, text=True, timeout=90, check=False
    )
    assert result.returncode == 0, result.stderr
    for words in ("prefill-1", "decode-1", "blocks", "time to first token", "all processes have ended"):
        assert words in result.stdout


def until_running(address: str) -> None:
    """Until a request runs; fails with the test's own time limit."""
    while not json.loads(run("status", "--json", "--address", address).stdout)["queue"]["running"]:
        pass
