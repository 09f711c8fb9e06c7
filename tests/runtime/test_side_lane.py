import asyncio
import threading
import time

import pytest

from runtime.errors import DeadlineError, OverloadedError, UnavailableError
from runtime.side_lane import SideLane


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


async def test_what_waits_beyond_its_deadline_never_runs_and_what_runs_keeps_its_place() -> None:
    lane, go, ran = SideLane(threads=1, max_waiting=1), threading.Event(), list[int]()
    first = asyncio.create_task(lane.run(time.monotonic() + 0.05, go.wait, 20))
    await asyncio.sleep(0)  # it has begun
    with pytest.raises(DeadlineError):
        await lane.run(time.monotonic() + 0.05, ran.append, 1)
    with pytest.raises(DeadlineError):
        await first
    waiting = asyncio.create_task(lane.run(None, ran.append, 2))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await lane.run(None, ran.append, 3)
    go.set()
    await waiting
    assert ran == [2]


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
