"""The planner's service: what ends one planner starts the next, and what it cannot write does not stop it."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from baton.service.local.nats_server import NatsServer
from baton_proto.planner import MAJOR
from planner.acting.connector import WorkerProcess
from planner.journal import Started
from planner.planner import Planner
from planner.service import KEY, PlannerService
from runtime.calls.planner import ask_plan
from runtime.config.planner import PlannerConfig
from runtime.config.serving import ServingConfig
from runtime.errors import ConfigError, DeadlineError, UnavailableError
from runtime.nats.client import connect
from tests.planner.observing.test_live_observer import say
from tests.planner.test_loop import Processes

WAIT_S = 30.0
CONFIG = ServingConfig(model="mock", planner=PlannerConfig(interval_s=0.2))


class Faulty(Processes):
    """A connector with a fault that comes as often as is said here."""

    def __init__(self, faults: int) -> None:
        super().__init__()
        self.faults = faults

    def processes(self) -> Iterable[WorkerProcess]:
        if self.faults:
            self.faults -= 1
            raise RuntimeError("a fault")
        return ()

    async def close(self) -> None: ...


async def test_after_a_fault_the_next_planner_goes_on(nats_server: NatsServer) -> None:
    nats = await connect(nats_server.url, "test")
    began: asyncio.Queue[str] = asyncio.Queue()
    service = PlannerService(CONFIG, nats, Faulty(faults=1), 8, {"prefill": 1, "decode": 1})
    task = asyncio.create_task(service.run(began.put_nowait))
    try:
        uptime_s = 0.0
        async with asyncio.timeout(WAIT_S):
            planned = False
            while began.qsize() < 2 or not planned:
                uptime_s += 0.1
                await say(nats, "a", uptime_s)
                await asyncio.sleep(0.02)
                with suppress(UnavailableError, DeadlineError):  # between two planners, or on a busy machine
                    planned = (await ask_plan(nats, 1.0)).target is not None
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await nats.close()


async def test_what_the_last_planner_remembered_is_taken_up_unless_it_cannot_be_read(nats_server: NatsServer) -> None:
    nats = await connect(nats_server.url, "test")
    try:
        service = PlannerService(CONFIG, nats, Faulty(faults=0), 8, {"prefill": 1, "decode": 1})
        await service._store.load(KEY)
        remembered = Planner(CONFIG.planner)
        remembered._next_number = 42
        await service._store.save(KEY, remembered.saved())
        assert (await service._restored())._next_number == 42
        await service._store.save(KEY, b"{}")
        assert (await service._restored())._next_number == 1
    finally:
        await nats.close()


async def test_a_journal_that_cannot_be_opened_is_refused_and_one_that_fails_later_stops_nothing(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    nats = await connect(nats_server.url, "test")
    try:
        nowhere = replace(CONFIG, planner=replace(CONFIG.planner, journal=str(tmp_path / "no" / "plan.jsonl")))
        with pytest.raises(ConfigError, match=r"plan\.jsonl: No such file"):
            PlannerService(nowhere, nats, Faulty(faults=0), 8, {"prefill": 1, "decode": 1})
        full = replace(CONFIG, planner=replace(CONFIG.planner, journal="/dev/full"))
        service = PlannerService(full, nats, Faulty(faults=0), 8, {"prefill": 1, "decode": 1})
        service._write(Started(0.0, MAJOR, "slo"))
        assert service._journal is not None
        service._journal.close()
    finally:
        await nats.close()
