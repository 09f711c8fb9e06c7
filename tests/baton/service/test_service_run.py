"""A run of a service whose router and NATS die: both are there again on the same ports, and nothing else ends."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton.service import service_run
from baton.service.launcher import Launcher
from baton.service.local.local_launcher import LocalLauncher
from baton.service.service_run import ServiceRun
from baton_proto.generated import inference_pb2 as pb
from runtime.calls.router import Client
from runtime.config.overrides import with_overrides
from runtime.config.serving import ServingConfig
from runtime.security.keys import OPERATOR_KEY_VARIABLE
from runtime.security.secret import Secret
from tests.service import TEST_DEFAULTS, assert_gone

WAIT_S = 60.0
KEY = "k" * 64


class Told:
    """What the run tells, one event after another."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.pids: dict[str, int] = {}  # the latest, by id
        self.addresses: dict[str, dict[str, str]] = {}

    def __call__(self, line: str, *, event: str, **fields: Any) -> None:
        if event == "ready":
            self.pids[fields["id"]], self.addresses[fields["id"]] = fields["pid"], fields["addresses"]
        self._events.put_nowait({"event": event, **fields})

    async def until(self, *wanted: dict[str, Any]) -> None:
        """Returns when each of these has been told since the last call, in whatever order."""
        left = list(wanted)
        async with asyncio.timeout(WAIT_S):
            while left:
                told = await self._events.get()
                left = [one for one in left if not one.items() <= told.items()]


@asynccontextmanager
async def running(
    launcher: Callable[[ServingConfig], Launcher] = LocalLauncher, **sections: object
) -> AsyncIterator[tuple[Told, "asyncio.Task[bool]"]]:
    config = with_overrides(with_overrides(ServingConfig(model="mock"), TEST_DEFAULTS), sections)
    told = Told()
    run = ServiceRun(config, launcher(config), told, os.environ | {OPERATOR_KEY_VARIABLE: KEY})
    task = asyncio.create_task(run.run())
    try:
        await told.until({"event": "serving"})
        yield told, task
    finally:
        run.stop.set()
        run.hurry.set()
        await asyncio.wait({task})
        assert_gone(told.pids.values())


async def test_a_router_and_a_nats_that_are_killed_are_there_again_and_the_worker_and_its_blocks_are_known() -> None:
    async with running(workers={"prefill": 0, "decode": 1}) as (told, task):
        before, worker = dict(told.addresses), told.pids["decode-1"]
        held = await blocks_after_a_request(told, expected_cached=0)
        for names in (["router-1"], ["nats"], ["nats", "router-1"]):
            for name in names:
                os.kill(told.pids[name], signal.SIGKILL)
            lost = [{"event": "lost", "id": name, "goes_on": True} for name in names]
            await told.until(*lost, *({"event": "ready", "id": name} for name in names))
            assert told.addresses == before
            assert await blocks_after_a_request(told, expected_cached=96) == held
        assert told.pids["decode-1"] == worker
        assert not task.done()


async def test_a_router_that_is_there_again_is_started_once_although_a_worker_that_it_waits_for_dies() -> None:
    async with running(workers={"prefill": 0, "decode": 2, "per_process": 1}, planner={"enabled": True}) as (told, _):
        os.kill(told.pids["decode-2"], signal.SIGSTOP)
        os.kill(told.pids["router-1"], signal.SIGKILL)
        await told.until({"event": "ready", "id": "router-1"})
        os.kill(told.pids["decode-2"], signal.SIGKILL)
        await told.until({"event": "lost", "id": "decode-2"})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(told.until({"event": "not_started"}), 1.0)


async def test_a_router_that_ends_again_and_again_ends_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_run, "STARTS", 1)
    async with running(workers={"prefill": 0, "decode": 0}) as (told, task):
        os.kill(told.pids["router-1"], signal.SIGKILL)
        await told.until({"event": "ready", "id": "router-1"})
        os.kill(told.pids["router-1"], signal.SIGKILL)
        await told.until({"event": "given_up", "id": "router-1"})
        assert not await task


async def test_a_model_that_sleeps_is_served_again_although_its_only_worker_is_killed() -> None:
    models = [{"name": "one", "model": "mock", "asleep": "until_asked"}]
    async with running(model="smollm2", models=models, workers={"prefill": 0, "decode": 1}) as (told, task):
        os.kill(told.pids["decode-one-1"], signal.SIGKILL)
        await told.until({"event": "lost", "id": "decode-one-1", "goes_on": True})
        request = pb.GenerateRequest(tokens=pb.TokenIds(ids=[3] * 20), sampling=pb.SamplingOptions(max_tokens=4))
        async with Client(told.addresses["router-1"]["grpc"], operator_key=Secret(KEY)) as client:
            assert (await client.generate(request, timeout_s=WAIT_S)).token_ids
        await told.until({"event": "ready", "id": "decode-one-1"}, {"event": "awake", "model": "one"})
        assert not task.done()


async def blocks_after_a_request(told: Told, expected_cached: int) -> int:
    """Blocks of the worker in the router's tree."""
    request = pb.GenerateRequest(
        tokens=pb.TokenIds(ids=[3 + i % 200 for i in range(100)]),
        sampling=pb.SamplingOptions(temperature=0.0, max_tokens=4, ignore_eos=True),
    )
    async with Client(told.addresses["router-1"]["grpc"], operator_key=Secret(KEY)) as client, asyncio.timeout(WAIT_S):
        while [worker.state for worker in (await client.status()).workers if not worker.note] != ["ready"]:
            await asyncio.sleep(0.01)
        while (answer := await client.generate(request, timeout_s=WAIT_S)).usage.cached_tokens != expected_cached:
            await asyncio.sleep(0.01)
        assert len(answer.token_ids) == 4
        while True:
            (state,) = (await client.status()).workers
            if state.blocks_in_tree == state.blocks_cached + state.blocks_used:
                return state.blocks_in_tree
            await asyncio.sleep(0.01)
