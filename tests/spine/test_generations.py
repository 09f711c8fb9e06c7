"""Two generations under one router: each answer comes from the weights of one, KV goes between workers of one alone,
and who cannot be talked to is named."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest

from baton.service.children import Children
from baton.service.launches import Launches
from baton.service.local import build_process
from baton.service.local.child_process import ChildProcess
from baton_proto import kv_events, transfer, worker
from baton_proto.generated import inference_pb2 as pb
from baton_proto.planner import Role
from runtime.processes.process import Process
from runtime.security.keys import handed_on
from tests.recipes.scratch import Scratch
from tests.service import Service, running_service
from tests.spine.oracle import Oracle
from tests.spine.prompts import ask, greedy, random_prompt
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

SHIP_ALL: dict[str, Any] = {"placement": {"local_prefill_tokens": 0}, "no_worker_timeout_s": 15.0}
MOCK: dict[str, Any] = {"workers": {"per_process": 1}}
BEGUN = 20  # tokens that a client has before the worker dies
LONG = 2000


@asynccontextmanager
async def started(
    service: Service, role: Role, name: str, tree: Path | None = None, **changes: Any
) -> AsyncIterator[Process]:
    """A worker that somebody starts by hand, from the sources in `tree`, with a configuration of its own."""
    config = msgspec.structs.replace(service.config, **changes)
    launch = Launches(config, handed_on(service.supervisor.keys, {}), Children()).worker(role, name)
    with pytest.MonkeyPatch.context() as patch:
        if tree is not None:  # a fork of what we have imported would be of our own sources
            patch.setattr(build_process, "ChildProcess", ChildProcess)
            launch = msgspec.structs.replace(launch, keys=launch.keys | {"PYTHONPATH": f"{tree}:{tree / 'proto'}"})
        process = service.supervisor.launcher.process(launch)
    await process.start()
    try:
        await process.wait_ready(90)
        yield process
    finally:
        if process.alive:
            await process.kill()
        await process.wait()


def prompt(seed: int) -> list[int]:
    """Of the mock engine a token is a byte."""
    return np.random.default_rng(seed).integers(97, 123, 90).tolist()


async def rows(service: Service) -> dict[str, pb.WorkerStatus]:
    return {row.worker_id: row for row in (await service.client.status(60)).workers}


async def until_used(service: Service, *names: str) -> None:
    until_s = time.monotonic() + 30
    while True:
        seen = await rows(service)
        if {name for name, row in seen.items() if row.used} == {*names}:
            return
        assert time.monotonic() < until_s, seen
        await asyncio.sleep(0.02)


class Long:
    """The tokens of an answer as they come."""

    def __init__(self, service: Service, seed: int) -> None:
        self.prompt = random_prompt(60, seed=seed)
        self.tokens: list[int] = []
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self._read(service))

    async def _read(self, service: Service) -> None:
        async for message in service.client.stream(greedy(self.prompt, LONG, ignore_eos=True)):
            self.tokens += message.piece.token_ids
            if len(self.tokens) >= BEGUN:
                self.begun.set()


async def begun_on(oracle: Oracle, service: Service, seeds: range) -> Long:
    """An answer that these weights have begun; others are left."""
    for seed in seeds:
        long = Long(service, seed)
        await long.begun.wait()
        if long.tokens[:BEGUN] == oracle.greedy(long.prompt, BEGUN, ignore_eos=True):
            return long
        long.task.cancel()
    raise AssertionError("no answer was begun by these weights")


async def test_answers_of_two_weights_are_of_one_each_and_go_on_with_it_or_fail(tmp_path: Path) -> None:
    folders = [write_tiny_model(tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    ours, theirs = (Oracle(folder) for folder in folders)
    sections: dict[str, Any] = {"served_model_name": "tiny", "router": SHIP_ALL}
    other: dict[str, Any] = {"model": str(folders[1])}
    async with running_service(folders[0], 1, 1, **sections) as service:
        async with (
            started(service, "prefill", "prefill-b", **other),
            started(service, "decode", "decode-b", **other) as dying,
        ):
            await until_used(service, "decode-1", "prefill-1", "decode-b", "prefill-b")
            notes = [row.note for row in (await rows(service)).values()]
            assert all(note.startswith("other decode workers have other weights") for note in notes), notes
            prompts = [random_prompt(90, seed=seed % 6) for seed in range(24)]  # of equal beginnings, too
            pairs = set()
            for answer, prompt in zip(
                await asyncio.gather(*(ask(service.client, one, 8) for one in prompts)), prompts, strict=True
            ):
                (served,) = answer.served_by
                oracle = theirs if served.decode_worker == "decode-b" else ours
                assert answer.token_ids == oracle.greedy(prompt, 8)
                pairs.add((served.prefill_worker, served.decode_worker))
            assert {(prefill or decode)[-1] + decode[-1] for prefill, decode in pairs} == {"11", "bb"}, pairs
            long = await begun_on(theirs, service, range(100, 120))
            await dying.kill()
            async with started(service, "decode", "decode-b2", **other) as next_one:
                await long.task
                assert long.tokens == theirs.greedy(long.prompt, LONG, ignore_eos=True, guess=long.tokens)
                again = await begun_on(theirs, service, range(200, 220))
                await next_one.kill()
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await again.task
                said = "no decode worker that has the weights that the answer was begun with was ready for 15.0 s"
                assert (failed.value.code(), failed.value.details()) == (grpc.StatusCode.UNAVAILABLE, said)
                assert again.tokens == theirs.greedy(again.prompt, LONG, ignore_eos=True)[: len(again.tokens)]
        fresh = random_prompt(50, seed=300)
        assert (await ask(service.client, fresh, 8)).token_ids == ours.greedy(fresh, 8)


@pytest.mark.parametrize("what", ["code", "transfer"])
async def test_workers_of_two_versions_serve_and_no_kv_goes_from_one_to_the_other(tmp_path: Path, what: str) -> None:
    tree = Scratch(tmp_path)
    if what == "code":
        info = tmp_path / "baton_serve-9.9.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: baton-serve\nVersion: 9.9\n")
    else:
        tree.edit("proto/baton_proto/transfer.py", f"MAJOR = {transfer.MAJOR}\n", "MAJOR = 99\n")
    async with (
        running_service("mock", 1, 1, router=SHIP_ALL, **MOCK) as service,
        started(service, "decode", "decode-9", tmp_path),
    ):
        await until_used(service, "decode-1", "prefill-1", "decode-9")
        answers = await asyncio.gather(*(ask(service.client, prompt(seed), 8) for seed in range(24)))
        served = [service for answer in answers for service in answer.served_by]
        assert {one.decode_worker for one in served} >= {"decode-1", "decode-9"}
        assert {one.prefill_worker for one in served if one.decode_worker == "decode-9"} == {""}
        assert {one.attempts for one in served} == {1}, "the pair is not even tried"
        async with started(service, "prefill", "prefill-9", tmp_path):
            await until_used(service, "decode-1", "prefill-1", "decode-9", "prefill-9")
            answers = await asyncio.gather(*(ask(service.client, prompt(seed), 8) for seed in range(50, 74)))
            served = [service for answer in answers for service in answer.served_by]
            pairs = {(one.prefill_worker, one.decode_worker) for one in served if one.prefill_worker}
            assert ("prefill-9", "decode-9") in pairs
            assert pairs <= {("prefill-9", "decode-9"), ("prefill-1", "decode-1")}


@pytest.mark.parametrize(
    ("message", "major", "said"),
    [
        ("worker", worker.MAJOR, "it speaks worker 99, "),
        ("kv_events", kv_events.MAJOR, "kv events 99"),
        ("discovery", 1, "worker record: major version 99 is not understood here"),
    ],
)
async def test_a_worker_of_another_protocol_is_named_and_nothing_hangs(
    tmp_path: Path, message: str, major: int, said: str
) -> None:
    Scratch(tmp_path).edit(f"proto/baton_proto/{message}.py", f"\nMAJOR = {major}\n", "\nMAJOR = 99\n")
    router = {"no_worker_timeout_s": 0.5}
    async with (
        running_service("mock", 0, 1, router=router, **MOCK) as service,
        started(service, "decode", "decode-9", tmp_path),
    ):
        async with asyncio.timeout(60):
            while "decode-9" not in (shown := await rows(service)):
                await asyncio.sleep(0.02)
        assert (shown["decode-9"].state, shown["decode-9"].used) == ("unknown", False)
        assert said in shown["decode-9"].note
        answers = await asyncio.gather(*(ask(service.client, prompt(seed), 4) for seed in range(8)))
        assert {answer.served_by[0].decode_worker for answer in answers} == {"decode-1"}
        service.kill("decode-1")
        with pytest.raises(grpc.aio.AioRpcError, match="no decode worker that can serve was ready") as failed:
            await ask(service.client, prompt(9), 4)
        assert "; not used: decode-9 (" in (details := failed.value.details() or "")
        assert said in details
        logged = [line for line in service.log("router-1").splitlines() if "decode-9" in line and "warning" in line]
        assert len([line for line in logged if "worker cannot be talked to" in line]) == 1
        assert len(logged) <= 3, logged
