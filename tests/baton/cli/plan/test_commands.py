"""`baton plan`, `scale`, `drain` and `flip`: usage, exit codes, and the real program against `baton up --planner`."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from baton.cli.app import app
from baton.cli.terminal.exit_codes import ExitCode
from baton.runs.access import Access
from baton.service.local.nats_server import NatsServer
from tests.service import assert_gone

pytestmark = pytest.mark.slow

BATON = [sys.executable, "-m", "baton"]
NOBODY = "nats://127.0.0.1:1"
COMMANDS = (["plan"], ["scale", "prefill=2"], ["drain", "decode-1"], ["flip", "decode-1"])
WAIT_S = 40.0
POLL_S = 0.05
SERVING = """
model: mock
router: {http_port: 0, grpc_port: 0}
planner: {interval_s: 1.0, limits: {max_prefill: 3, max_decode: 3}}
"""


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["scale"], "name counts such as prefill=2 decode=3, or --release"),
        (["scale", "prefill=1", "--release"], "name counts"),
        (["scale", "prefill=-1"], "'prefill=-1' is not a count"),
        (["scale", "gpus=4"], "'gpus=4' is not a count"),
        (["scale", "decode=1", "decode=2"], "a role is named twice"),
        (["drain"], "WORKER"),
        (["plan", "--decisions", "0"], "--decisions"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_is_wrong(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (ExitCode.USAGE, "")
    assert words in " ".join(result.stderr.split())


@pytest.mark.parametrize("command", [*COMMANDS, ["plan", "--dry-run"]])
def test_without_nats_they_end_with_3_and_name_the_url(command: list[str]) -> None:
    result = run(*command, "--nats-url", NOBODY, "--timeout", "1")
    assert result.exit_code == ExitCode.UNAVAILABLE
    assert f"error: NATS at {NOBODY}" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", COMMANDS)
async def test_without_a_planner_they_end_with_3_and_say_how_to_start_one(
    nats_server: NatsServer, command: list[str]
) -> None:
    result = await asyncio.to_thread(run, *command, "--nats-url", nats_server.url)
    assert result.exit_code == ExitCode.UNAVAILABLE
    assert result.stderr == "error: no planner runs in namespace 'default'; `baton up --planner` starts one\n"


async def test_what_an_operator_says_is_done_and_shown(nats_server: NatsServer, tmp_path: Path) -> None:
    async with service(nats_server, tmp_path) as (_, addresses):
        plan = json.loads(await baton(nats_server, "plan", "--json"))
        assert {worker["worker_id"] for worker in plan["observation"]["workers"]} == {"prefill-1", "decode-1"}
        said = await baton(nats_server, "scale", "decode=2")
        assert said == "set by hand: decode 2; `baton scale --release` takes it back\n"
        plan = await until_workers(nats_server, 1, 2)
        shown = await baton(nats_server, "plan")
        assert "set by hand: decode 2" in shown
        assert "requests/s of 0 + 0 tokens expected" in shown
        async with asyncio.timeout(WAIT_S):
            watched = [plan async for plan in watching(nats_server, 3)]
        assert [plan["target"]["decode"] for plan in watched] == [2, 2, 2]
        assert len({json.dumps(plan["observation"]) for plan in watched}) == 3, "each decision once"
        advice = await baton(nats_server, "plan", "--dry-run", "--decisions", "1")
        assert "advice only: nothing is done" in advice
        assert "drains; `baton plan`" in await baton(nats_server, "drain", "decode-1")
        async with httpx.AsyncClient(timeout=60) as http, asyncio.timeout(60):
            metrics = ""
            while not re.search(r'baton_planner_effects_total\{outcome="done",verb="add"\} [1-9]', metrics):
                metrics = (await http.get(addresses["metrics"])).text
                await asyncio.sleep(POLL_S)
        assert 'baton_planner_workers_wanted{role="decode"} 2.0' in metrics
        assert "baton_planner_frozen 0.0" in metrics


async def test_a_service_that_was_killed_in_mid_scaling_ends_up_as_it_was_told_when_it_runs_again(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with service(nats_server, tmp_path) as (process, _):
        await baton(nats_server, "scale", "prefill=2", "decode=2")
        while len(children := process.children(recursive=True)) < 5:  # a router and two workers, then four
            await asyncio.sleep(POLL_S)
        process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(assert_gone, [child.pid for child in children])
    async with service(nats_server, tmp_path) as (process, addresses):
        await until_workers(nats_server, 2, 2)
        async with Access(addresses["grpc"]).client() as client:
            status = await client.status()
        ready = [worker.role for worker in status.workers if worker.state == "ready"]
        assert sorted(ready) == ["decode", "decode", "prefill", "prefill"]
        assert len(process.children(recursive=True)) == 6


@asynccontextmanager
async def service(nats_server: NatsServer, folder: Path) -> AsyncIterator[tuple[psutil.Process, dict[str, str]]]:
    """`baton up --planner` as a person would start it, once the planner is at work; drained at the end."""
    (folder / "serving.yaml").write_text(SERVING)
    up = await asyncio.create_subprocess_exec(
        *(*BATON, "up", "--planner", "--json", "--config", str(folder / "serving.yaml")),
        *("--set", f"nats.url={nats_server.url}", "--log-dir", str(folder)),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert up.stdout is not None
    process, addresses = psutil.Process(up.pid), {}
    async with asyncio.timeout(WAIT_S):
        async for line in up.stdout:
            event = json.loads(line)
            if event["event"] == "serving":
                addresses["grpc"] = event["grpc"]
            if event["event"] == "planner":
                addresses["metrics"] = event["metrics"]
                break
    try:
        await until_workers(nats_server, 1, 1, at_least=True)
        yield process, addresses
    finally:
        pids: list[int] = []
        with suppress(psutil.NoSuchProcess):  # it was killed
            pids = [child.pid for child in process.children(recursive=True)]
        if up.returncode is None:
            up.terminate()
        await asyncio.wait_for(asyncio.gather(up.wait(), up.stdout.read()), WAIT_S)
        await asyncio.to_thread(assert_gone, pids)


async def until_workers(nats_server: NatsServer, prefill: int, decode: int, at_least: bool = False) -> dict[str, Any]:
    """Until the planner sees so many that are ready, and no others; its plan."""
    plan: dict[str, Any] = {}
    async with asyncio.timeout(WAIT_S):
        while True:
            result = await asyncio.to_thread(run, "plan", "--json", "--nats-url", nats_server.url)
            plan = json.loads(result.stdout)
            workers = (plan["observation"] or {"workers": []})["workers"]
            ready = [worker["role"] for worker in workers if worker["state"] == "ready"]
            have = ready.count("prefill"), ready.count("decode")
            if have == (prefill, decode) and len(ready) == len(workers):
                return plan
            if at_least and min(have[0] - prefill, have[1] - decode) >= 0:
                return plan
            await asyncio.sleep(POLL_S)


async def watching(nats_server: NatsServer, count: int) -> AsyncIterator[dict[str, Any]]:
    """So many decisions that `baton plan --watch` prints; SIGINT ends it with 0."""
    process = await asyncio.create_subprocess_exec(
        *(*BATON, "plan", "--watch", "--interval", "0.1", "--json", "--nats-url", nats_server.url),
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    for _ in range(count):
        yield json.loads(await process.stdout.readline())
    process.send_signal(signal.SIGINT)
    await process.stdout.read()
    assert await process.wait() == ExitCode.OK


async def baton(nats_server: NatsServer, *arguments: str) -> str:
    """What the real program prints."""
    process = await asyncio.create_subprocess_exec(
        *BATON,
        *arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"BATON_NATS_URL": nats_server.url},
    )
    stdout, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode()
    return stdout.decode()
