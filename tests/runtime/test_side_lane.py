import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

from runtime.errors import DeadlineError, OverloadedError, UnavailableError
from runtime.side_lane import TENANT, SideLane, stop_if_unwanted

T = TypeVar("T")


async def test_work_runs_beside_the_loop_and_gives_its_result_or_error() -> None:
    lane = SideLane()
    assert await lane.run(None, threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await lane.run(None, lambda: 1 / 0)


async def test_no_more_runs_and_waits_than_the_lane_has_places() -> None:
    lane, go, began = SideLane(threads=1, max_waiting=2), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        go.wait(20)

    running = [asyncio.create_task(lane.run(None, work)) for _ in range(3)]
    await asyncio.to_thread(began.wait, 20)
    with pytest.raises(OverloadedError, match="queue of long prompts holds its limit of 3") as caught:
        await lane.run(None, work)
    assert caught.value.retry_after_s > 0
    go.set()
    await asyncio.gather(*running)
    await lane.run(None, work)


async def test_what_waits_beyond_its_deadline_never_runs_and_what_runs_keeps_its_thread() -> None:
    lane, go, ran = SideLane(threads=1, max_waiting=1), threading.Event(), list[int]()
    first = asyncio.create_task(lane.run(time.monotonic() + 0.05, go.wait, 20))
    await asyncio.sleep(0)  # it has begun
    with pytest.raises(UnavailableError, match="all threads for long prompts busy"):
        await lane.run(time.monotonic() + 0.05, ran.append, 1)
    with pytest.raises(DeadlineError):
        await first
    with pytest.raises(DeadlineError, match="was late before it began"):
        await lane.run(time.monotonic(), ran.append, 1)
    waiting = asyncio.create_task(lane.run(None, ran.append, 2))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await lane.run(None, ran.append, 3)
    go.set()
    await waiting
    assert ran == [2]


class Flood:
    """A tenant's work, which holds as many threads and places as it gets until it is let go."""

    def __init__(self, lane: SideLane, tenant: str, count: int) -> None:
        self.go = threading.Event()
        self.tasks = [asyncio.create_task(as_tenant(tenant, lane, self.go.wait, 20)) for _ in range(count)]

    async def end(self) -> list[BaseException]:
        """What became of those that were refused."""
        self.go.set()
        ends = await asyncio.gather(*self.tasks, return_exceptions=True)
        return [end for end in ends if isinstance(end, BaseException)]


async def as_tenant(tenant: str, lane: SideLane, work: Callable[..., T], *args: object) -> T:
    TENANT.set(tenant)
    return await lane.run(None, work, *args)


async def test_a_tenant_that_fills_a_lane_leaves_a_thread_and_its_latest_places_to_others() -> None:
    lane, ran = SideLane(threads=3, max_waiting=8), list[int]()
    flood = Flood(lane, "a", 20)
    await asyncio.sleep(0)
    for number in range(20):
        await asyncio.create_task(as_tenant("b", lane, ran.append, number))
    assert ran == list(range(20)), "one after another, while the other tenant's work runs"
    refused = await flood.end()
    assert len(refused) == 10
    assert all(isinstance(error, OverloadedError) for error in refused)


async def test_a_newcomer_takes_the_place_of_who_holds_most_until_both_hold_as_much() -> None:
    lane = SideLane(threads=2, max_waiting=6)
    floods = [Flood(lane, "a", 30), Flood(lane, "b", 30)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert [sum(not task.done() for task in flood.tasks) for flood in floods] == [4, 4]
    for flood in floods:
        await flood.end()


async def test_work_whose_caller_has_gone_does_not_begin_and_ends_at_its_next_step() -> None:
    lane, began, go, steps = SideLane(threads=1), threading.Event(), threading.Event(), list[int]()

    def work() -> None:
        stop_if_unwanted()
        steps.append(1)
        began.set()
        go.wait(20)
        stop_if_unwanted()
        steps.append(2)

    running = asyncio.create_task(lane.run(None, work))
    await asyncio.to_thread(began.wait, 20)
    waiting = asyncio.create_task(lane.run(None, steps.append, 3))
    await asyncio.sleep(0)
    for task in (running, waiting):
        task.cancel()
    await asyncio.wait((running, waiting))
    go.set()
    assert await lane.run(None, steps.copy) == [1]


async def test_a_lane_without_threads_says_so_each_time_and_works_once_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    lane, ran = SideLane(threads=1, max_waiting=1), list[int]()
    with monkeypatch.context() as starved:
        starved.setattr(threading.Thread, "start", start)
        for number in range(5):
            with pytest.raises(UnavailableError, match="no thread for long prompts: can't start new thread"):
                await lane.run(None, ran.append, number)
    assert await lane.run(None, threading.get_ident) != threading.get_ident()
    assert ran == []
