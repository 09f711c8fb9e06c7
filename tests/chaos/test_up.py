"""What chaos does with the processes that `baton up --planner` has started: it notices their ends, and starts the
supervisor again when a fault has ended it."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from runtime.end_task import end_tasks
from tests.chaos import faults
from tests.chaos.faults import BORNE_S, strike_in
from tests.chaos.machine.disk import Disk
from tests.chaos.machine.hosts import HERE
from tests.chaos.plan import Strike
from tests.chaos.service.fleet import running_fleet
from tests.chaos.service.scenarios import BY_NAME
from tests.chaos.service.up import SUPERVISOR, Adopted, Up, UpFleet


@pytest.fixture
async def adopted(tmp_path: Path) -> AsyncIterator[Adopted]:
    with subprocess.Popen(["sleep", "60"]) as process:
        member = Adopted("decode-1", "decode", (), tmp_path / "decode-1.log", own_pid=process.pid)
        assert member.adopt()
        yield member
        await member.kill()


async def test_everyone_who_waits_for_the_end_of_an_adopted_process_hears_of_it(adopted: Adopted) -> None:
    waiting = [asyncio.create_task(adopted.ended()) for _ in range(2)]
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await adopted.kill()
        assert await asyncio.gather(*waiting) == [0, 0]


async def test_a_fault_that_is_over_after_the_end_of_its_process_signals_nobody(adopted: Adopted) -> None:
    adopted.signal(signal.SIGSTOP)
    await adopted.kill()
    adopted.signal(signal.SIGCONT)
    assert not adopted.alive


async def test_a_supervisor_may_give_up_when_it_loses_a_worker_before_it_is_up(folder: Path, adopted: Adopted) -> None:
    fleet = UpFleet(BY_NAME["planner"], [HERE], folder, "mock", "cpu", Disk(folder))
    supervisor = Up(SUPERVISOR, "supervisor", (), folder / "supervisor.log")
    fleet.members |= {SUPERVISOR: supervisor, adopted.name: adopted}
    await adopted.kill()
    fleet.lost(adopted)
    assert supervisor.may_end
    assert not supervisor.expected_end


async def test_a_worker_that_is_told_to_end_before_it_is_ready_ends_as_it_was_asked_to(folder: Path) -> None:
    fleet = UpFleet(BY_NAME["planner"], [HERE], folder, "mock", "cpu", Disk(folder))
    fleet.members[SUPERVISOR] = Up(SUPERVISOR, "supervisor", (), folder / "supervisor.log")
    fleet._retire("decode-7")
    with subprocess.Popen(["sleep", "60"]) as process:
        fleet._adopt({"id": "decode-7", "process": "decode_worker", "pid": process.pid, "addresses": {"rpc": "x"}})
        await fleet.members["decode-7"].kill()
        await asyncio.gather(*fleet._tasks)
    assert (fleet.problems, "decode-7" in fleet.members) == ([], False)


@pytest.mark.parametrize("fault", ["stop router", "routers frozen"])
@pytest.mark.parametrize(("borne_s", "may_end"), [(60.0, False), (0.0, True)])
async def test_a_router_that_hangs_may_be_killed_after_the_bound_and_not_before(
    folder: Path, adopted: Adopted, monkeypatch: pytest.MonkeyPatch, fault: str, borne_s: float, may_end: bool
) -> None:
    monkeypatch.setattr(faults, "BORNE_S", borne_s)
    fleet = UpFleet(BY_NAME["routers"], [HERE], folder, "mock", "cpu", Disk(folder))
    adopted.kind, adopted.addresses = "router", {"grpc": "nowhere"}
    supervisor = Up(SUPERVISOR, "supervisor", (), folder / "supervisor.log")
    fleet.members |= {SUPERVISOR: supervisor, adopted.name: adopted}
    tending = asyncio.create_task(fleet._tend_adopted(adopted))
    striking = asyncio.create_task(strike_in(fleet, Strike(fault, 0.0, 0, 60.0)))
    async with asyncio.timeout(20):
        while psutil.Process(adopted.pid).status() != psutil.STATUS_STOPPED:
            await asyncio.sleep(0.001)
        await adopted.kill()
        await tending
    await end_tasks(striking)
    assert fleet.problems == ([] if may_end else [f"decode-1 ended unasked (struck: ['{fault}'])"])


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_supervisor_whose_router_was_killed_before_it_was_up_is_started_again(folder: Path) -> None:
    async with running_fleet(BY_NAME["planner"], folder / "planner", "mock", "cpu") as fleet:
        supervisor = fleet.members[SUPERVISOR]
        supervisor.expected_end = True
        await supervisor.kill()
        async with asyncio.timeout(60):
            while not (supervisor.lives == 2 and any(one.ready for one in fleet.of("router"))):
                await asyncio.sleep(0.001)
        await strike_in(fleet, Strike("kill router", 0.0, 0, 0.0))
        await fleet.until_whole()
        assert supervisor.lives == 3
        assert fleet.problems == []


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_router_that_ends_by_itself_is_a_problem_and_its_supervisor_starts_it_again(folder: Path) -> None:
    async with running_fleet(BY_NAME["planner"], folder / "planner", "mock", "cpu") as fleet:
        (router,) = fleet.of("router")
        others = fleet.of("supervisor", "prefill", "decode")
        os.kill(router.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while fleet.of("router") in ([router], []):
                await asyncio.sleep(0.01)
        await fleet.until_whole()
        assert fleet.problems == [f"{router.name} ended unasked (struck: [])"]
        assert fleet.of("supervisor", "prefill", "decode") == others
        assert fleet.members[SUPERVISOR].lives == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("hold_s", "lives"), [(BORNE_S, True), (6.5, False)])
async def test_a_router_that_is_stopped_lives_on_or_is_replaced_after_the_bound(
    folder: Path, hold_s: float, lives: bool
) -> None:
    async with running_fleet(BY_NAME["routers"], folder / "routers", "mock", "cpu") as fleet:
        before = fleet.of("router")
        await strike_in(fleet, Strike("stop router", 0.0, 0, hold_s))
        await fleet.until_whole()
        assert fleet.problems == []
        assert [router in fleet.of("router") for router in before] == [lives, True]
