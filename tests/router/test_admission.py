"""The router's queue: order, bounds, and that nothing is held by whoever has left."""

import asyncio
import contextlib
from dataclasses import dataclass, field

import pytest

from baton.errors import OverloadedError
from router.admission import LOOK_AHEAD, AdmissionQueue


@dataclass
class Rooms:
    """Grants as many rooms as it has."""

    free: int
    order: list[str] = field(default_factory=list)

    def take(self, name: str) -> "Room | None":
        if not self.free:
            return None
        self.free -= 1
        self.order.append(name)
        return Room(self)


@dataclass
class Room:
    rooms: Rooms

    def release(self) -> None:
        self.rooms.free += 1


async def stay(queue: AdmissionQueue, rooms: Rooms, name: str, priority: int, leave: asyncio.Event) -> None:
    with queue.admit(priority) as ticket, queue.turn(ticket, lambda: rooms.take(name)) as turn:
        assert await turn.wait(5.0) is not None
        await leave.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_order_is_priority_then_arrival() -> None:
    queue, rooms, leave = AdmissionQueue(100), Rooms(0), asyncio.Event()
    names = [("a", 0), ("b", 5), ("c", 0), ("d", 5), ("e", -1)]
    tasks = [asyncio.create_task(stay(queue, rooms, name, priority, leave)) for name, priority in names]
    await settle()
    assert queue.view()[:2] == (5, 0)
    for _ in names:
        rooms.free += 1
        queue.wake()
        await settle()
    assert rooms.order == ["b", "d", "a", "c", "e"]
    leave.set()
    await asyncio.gather(*tasks)
    assert (rooms.free, queue.view()[:2]) == (5, (0, 0))


async def test_a_newcomer_does_not_overtake_those_who_wait() -> None:
    queue, rooms, leave = AdmissionQueue(100), Rooms(0), asyncio.Event()
    first = asyncio.create_task(stay(queue, rooms, "first", 0, leave))
    await settle()
    rooms.free = 1  # nobody was told yet
    second = asyncio.create_task(stay(queue, rooms, "second", 0, leave))
    await settle()
    assert rooms.order == ["first"]
    leave.set()
    queue.wake()
    await asyncio.gather(first, asyncio.wait_for(release_chain(queue), 1.0))
    await second


async def release_chain(queue: AdmissionQueue) -> None:
    while queue.view().waiting:
        queue.wake()
        await asyncio.sleep(0)


async def test_more_than_the_limit_are_refused_with_a_time_to_come_back() -> None:
    queue = AdmissionQueue(2)
    with queue.admit(), queue.admit():
        with pytest.raises(OverloadedError) as refused:
            queue.admit()
        assert refused.value.limit == 2
        assert refused.value.retry_after_s >= 1.0
    with queue.admit():
        pass


async def test_one_that_cannot_go_does_not_hold_up_those_behind_it() -> None:
    queue, rooms, leave = AdmissionQueue(100), Rooms(0), asyncio.Event()
    with queue.admit() as ticket, queue.turn(ticket, lambda: None) as stuck:
        behind = asyncio.create_task(stay(queue, rooms, "behind", 0, leave))
        await settle()
        rooms.free = 1
        queue.wake()
        await settle()
        assert rooms.order == ["behind"]
        assert await stuck.wait(0.0) is None
    leave.set()
    await behind


async def test_news_costs_a_bounded_number_of_attempts() -> None:
    queue, attempts = AdmissionQueue(1000), 0

    def attempt() -> None:
        nonlocal attempts
        attempts += 1

    with contextlib.ExitStack() as stack:
        for _ in range(10 * LOOK_AHEAD):
            ticket = stack.enter_context(queue.admit())
            stack.enter_context(queue.turn(ticket, attempt))
        await settle()
        attempts = 0
        for _ in range(100):  # within one round of the event loop
            queue.wake()
        await settle()
        assert attempts == LOOK_AHEAD


async def test_a_wait_ends_with_its_time_and_the_turn_keeps_its_place() -> None:
    queue, rooms, leave = AdmissionQueue(100), Rooms(0), asyncio.Event()
    with queue.admit() as ticket, queue.turn(ticket, lambda: rooms.take("early")) as turn:
        assert await turn.wait(0.01) is None
        late = asyncio.create_task(stay(queue, rooms, "late", 0, leave))
        await settle()
        assert queue.view().oldest_age_s >= 0.01
        rooms.free = 1
        queue.wake()
        assert await turn.wait(1.0) is not None
        assert rooms.order == ["early"]
    leave.set()
    queue.wake()
    await late


async def test_a_waiter_that_is_cancelled_as_its_turn_comes_gives_the_room_back() -> None:
    queue, rooms, leave = AdmissionQueue(100), Rooms(0), asyncio.Event()
    waiter = asyncio.create_task(stay(queue, rooms, "waiter", 0, leave))
    await settle()
    rooms.free = 1
    queue.wake()
    loop = asyncio.get_running_loop()
    loop.call_soon(waiter.cancel)  # runs right behind the queue's own round, before the waiter does
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert rooms.order == ["waiter"]
    assert (rooms.free, queue.view()[:2]) == (1, (0, 0))


async def test_a_waiter_that_leaves_early_is_forgotten() -> None:
    queue, rooms = AdmissionQueue(100), Rooms(0)
    waiter = asyncio.create_task(stay(queue, rooms, "waiter", 0, asyncio.Event()))
    await settle()
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    rooms.free = 1
    queue.wake()
    await settle()
    assert (rooms.order, queue.view()[:2]) == ([], (0, 0))


async def test_a_failing_attempt_reaches_its_own_waiter_only() -> None:
    queue, rooms, leave = AdmissionQueue(100), Rooms(0), asyncio.Event()
    leave.set()

    def fail() -> None:
        if rooms.free:
            raise ValueError("boom")

    with queue.admit() as ticket, queue.turn(ticket, fail) as turn:
        other = asyncio.create_task(stay(queue, rooms, "other", 0, leave))
        await settle()
        rooms.free = 1
        queue.wake()
        with pytest.raises(ValueError, match="boom"):
            await turn.wait(1.0)
        await other


async def test_waiting_for_the_last_request_to_end() -> None:
    queue = AdmissionQueue(10)
    assert await queue.wait_empty(0.0) == 0
    with queue.admit():
        assert await queue.wait_empty(0.01) == 1
        waiting = asyncio.create_task(queue.wait_empty(5.0))
        await settle()
        assert not waiting.done()
    assert await waiting == 0
