"""`baton events tree`, `diff` and `explain`: usage, exit codes, and the real program against a real service."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from typer.testing import CliRunner

from baton.cli.app import app
from baton.cli.terminal.exit_codes import ExitCode
from baton_proto.generated import inference_pb2 as pb
from baton_proto.kv_events import MAJOR, KvEventBatch, Stored, encode_batch
from runtime.blocks.block_hash import block_hashes, sequence_hashes
from runtime.nats.subjects import kv_events_subject
from tests.service import Service, running_service
from tests.spine.prompts import ask, greedy, random_prompt
from tests.spine.worker_view import until_idle, until_tree_is_right

pytestmark = pytest.mark.slow

BATON = [sys.executable, "-m", "baton"]
NOBODY = "127.0.0.1:1"
COMMANDS = (["tree"], ["diff"], ["explain", "--prompt", "a"])


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["events", *arguments])


@pytest.mark.parametrize("command", COMMANDS)
def test_no_router_at_the_address_ends_with_3_and_names_the_address(command: list[str]) -> None:
    result = run(*command, "--address", NOBODY)
    assert result.exit_code == ExitCode.UNAVAILABLE
    assert result.stderr.startswith(f"error: no router answers at {NOBODY}: ")
    assert (result.stdout, "Traceback" in result.stderr) == ("", False)


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_router_that_keeps_silent_ends_with_4_after_the_timeout(command: list[str]) -> None:
    ended = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ended.wait()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    address = "{}:{}".format(*server.sockets[0].getsockname())
    result = await asyncio.to_thread(run, *command, "--address", address, "--timeout", "0.3")
    ended.set()
    server.close()
    assert result.exit_code == ExitCode.DEADLINE
    assert address in result.stderr
    assert "within 0.3 s" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explain"], "REQUEST_ID"),
        (["explain", "r1", "--prompt", "a"], "REQUEST_ID"),
        (["explain", "--prompt", "a", "--tokens", "1"], "REQUEST_ID"),
        (["explain", "--tokens", "1,x"], "1,x"),
        (["explain", "r1", "--cache-salt", "x"], "--cache-salt"),
        (["tree", "--depth", "-1"], "--depth"),
        (["diff", "--timeout", "0"], "--timeout"),
    ],
)
def test_wrong_usage_ends_with_2(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == ExitCode.USAGE
    assert words in result.stderr


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def service(tiny_model: Path) -> AsyncIterator[Service]:
    async with running_service(tiny_model, router={"placement": {"local_prefill_tokens": 50}}) as service:
        yield service


async def events(service: Service, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The real program, while the service's own event loop goes on."""
    process = await asyncio.create_subprocess_exec(
        *BATON,
        "events",
        *arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"BATON_ADDRESS": service.grpc_address},
    )
    stdout, stderr = await process.communicate()
    return subprocess.CompletedProcess(arguments, process.returncode or 0, stdout.decode(), stderr.decode())


def tokens_option(tokens: list[int]) -> tuple[str, str]:
    return "--tokens", ",".join(map(str, tokens))


class TestAgainstAService:
    """In this order: the last test breaks the router's tree."""

    pytestmark = pytest.mark.asyncio(loop_scope="module")

    async def test_the_tree_shows_runs_owners_and_the_hottest_prefixes(self, service: Service) -> None:
        trunk = random_prompt(160, seed=1)
        for seed in (2, 3):
            await ask(service.client, trunk + random_prompt(64, seed=seed), 1)
            await until_idle(service)
            await until_tree_is_right(service)
        await ask(service.client, trunk, 1)
        await until_idle(service)
        await until_tree_is_right(service)

        answer = json.loads((await events(service, "tree", "--json", "--depth", "0")).stdout)
        names = [
            f"{name:016x}" for name in sequence_hashes(block_hashes(np.array(trunk, dtype=np.uint32), 16)).tolist()
        ]
        (run,) = [run for run in answer["runs"] if run["first_hash"] == names[0]]
        behind = [other for other in answer["runs"] if other["parent"] == run["number"]]
        assert (run["depth"], run["first_block"], run["blocks"], run["children"]) == (1, 0, 10, 2)
        assert [(other["first_block"], other["blocks"]) for other in behind] == [(10, 4), (10, 4)]
        assert {owner["worker_id"] for owner in run["owners"]} == {"prefill-1", "decode-1"}
        assert run["hits"] == 2
        assert answer["summary"]["hottest"][0] | {"owners": None} == {
            "last_hash": names[-1],
            "blocks": 10,
            "hits": 2,
            "owners": None,
        }
        status = await service.client.status(60)
        assert answer["summary"]["blocks"] == status.totals.tree_blocks == sum(r["blocks"] for r in answer["runs"])

        shown = await events(service, "tree")
        assert shown.returncode == 0
        for words in ("router-1: ", "10 blocks  tokens 0 to 160  decode-1, prefill-1  2 hits", names[0], "reused most"):
            assert words in shown.stdout
        shallow = await events(service, "tree", "--depth", "1")
        assert "2 more" in shallow.stdout

    async def test_explain_tells_why_a_request_went_where_it_went(self, service: Service) -> None:
        request = greedy(random_prompt(100, seed=5), 3)
        request.request_id = "my-request"
        await service.client.generate(request, 20)
        result = await events(service, "explain", "my-request")
        assert result.returncode == 0
        for words in (
            "request my-request-",
            "decode on decode-1, prompt shipped from prefill-1 (shipped)",
            "100 tokens not cached on decode-1, 0 queued there: more than local_prefill_tokens 50",
            "until the first token, which took ",
            "chosen",
        ):
            assert words in result.stdout
        answer = json.loads((await events(service, "explain", "my-request", "--json")).stdout)
        (decision,) = answer["decisions"]
        assert (decision["reason"], decision["num_tokens"], decision["attempt"]) == ("shipped", 100, 1)
        assert [(c["worker_id"], c["chosen"]) for c in decision["candidates"]] == [
            ("prefill-1", True),
            ("decode-1", True),
        ]
        assert answer["rules"]["local_prefill_tokens"] == 50
        passed = [(hop["name"], hop["depth"], hop["worker"]) for hop in answer["hops"]]
        assert passed[:3] == [("attempt", 0, ""), ("queue", 1, ""), ("placement", 1, "")]
        assert ("KV push", 2, "prefill-1") in passed
        assert passed[-1] == ("decode", 1, "decode-1")
        times = [(hop["from_ms"], hop["to_ms"]) for hop in answer["hops"]]
        assert all(0 <= begun <= ended <= times[0][1] for begun, ended in times)
        assert sum(hop["tokens"] for hop in answer["hops"] if hop["name"] == "prefill chunk") == 100
        assert "    KV push" in result.stdout
        assert "GB/s by shm" in result.stdout

    async def test_explain_tells_where_a_prompt_would_go(self, service: Service) -> None:
        known = random_prompt(160, seed=1)  # cached on both by now
        cached = await events(service, "explain", *tokens_option(known + random_prompt(40, seed=6)))
        assert "40 tokens not cached on decode-1, 0 queued there: it costs less there" in cached.stdout
        assert "decode on decode-1, which runs the prompt itself (sooner there)" in cached.stdout
        salted = await events(service, "explain", *tokens_option(known), "--cache-salt", "of another")
        assert "160 tokens not cached on decode-1" in salted.stdout
        new = json.loads((await events(service, "explain", "--prompt", "many words " * 40, "--json")).stdout)
        assert new["decisions"][0]["prefill_worker"] == "prefill-1"
        chat = json.loads((await events(service, "explain", "--chat", "Who?", "--json")).stdout)
        assert chat["decisions"][0]["num_tokens"] > 5
        status = await service.client.status(60)
        assert status.queue.running == 0

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["never-heard-of"], "no decision for 'never-heard-of'"),
            (["--prompt", ""], "text: is empty"),
            (["--tokens", "100000"], "100000"),
        ],
    )
    async def test_what_cannot_be_explained_ends_with_2(
        self, service: Service, arguments: list[str], words: str
    ) -> None:
        result = await events(service, "explain", *arguments)
        assert result.returncode == ExitCode.USAGE
        assert words in result.stderr

    async def test_diff_agrees_while_requests_run(self, service: Service) -> None:
        requests = [
            asyncio.create_task(ask(service.client, random_prompt(200, seed=20 + i), 200, ignore_eos=True))
            for i in range(3)
        ]
        result = await events(service, "diff", "--json")
        assert result.returncode == 0, result
        workers = json.loads(result.stdout)["workers"]
        assert [(w["worker_id"], w["verdict"]) for w in workers] == [("decode-1", "equal"), ("prefill-1", "equal")]
        assert all(worker["worker_blocks"] for worker in workers)
        await asyncio.gather(*requests)

    async def test_a_worker_that_does_not_answer_ends_with_3(self, service: Service) -> None:
        result = await events(service, "diff", "--worker", "decode-9", "--worker", "decode-1")
        assert result.returncode == ExitCode.UNAVAILABLE
        assert "the router knows no such worker" in result.stdout
        assert "equal" in result.stdout

    async def test_diff_finds_what_a_bogus_event_has_planted(self, service: Service) -> None:
        await until_idle(service)
        await until_tree_is_right(service)
        status = await service.client.status(60)
        (worker,) = [worker for worker in status.workers if worker.worker_id == "decode-1"]
        hashes = block_hashes(np.array(random_prompt(48, seed=9), dtype=np.uint32), 16)
        planted = sequence_hashes(hashes)
        await publish_as(service, worker, Stored(None, hashes.tobytes(), planted.tobytes()))
        async with asyncio.timeout(60):
            while (await service.client.status(60)).totals.tree_blocks == status.totals.tree_blocks:
                await asyncio.sleep(0.01)

        result = await events(service, "diff")
        assert result.returncode == ExitCode.FAILED
        assert "decode-1: 3 blocks only the tree has" in result.stdout
        as_json = json.loads((await events(service, "diff", "--json", "--blocks", "2")).stdout)
        by_id = {found["worker_id"]: found for found in as_json["workers"]}
        assert by_id["prefill-1"]["verdict"] == "equal"
        found = by_id["decode-1"]
        assert (found["verdict"], found["missing"], found["extra"]) == ("different", 0, 3)
        assert found["extra_hashes"] == [f"{name:016x}" for name in planted[:2].tolist()]


async def publish_as(service: Service, worker: pb.WorkerStatus, event: Stored) -> None:
    """An event that the worker did not publish, under its name and its next number."""
    batch = KvEventBatch(MAJOR, worker.worker_id, worker.incarnation, worker.last_event_id + 1, time.time(), [event])
    nats = await service.connect_nats("intruder")
    await nats.publish(kv_events_subject("default", worker.worker_id), encode_batch(batch))
    await nats.close()
