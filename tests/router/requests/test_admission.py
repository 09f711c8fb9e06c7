"""The router's queue: order, bounds, and that nothing is held by whoever has left."""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings, strategies as st

from router.requests.admission import LOOK_AHEAD, AdmissionQueue
from runtime.errors import OverloadedError


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
        assert await turn.wait(30) is not None
        await leave.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_surely_comes_before_a_turn_are_more_urgent_ones_and_earlier_ones_of_its_tenant() -> None:
    queue = AdmissionQueue(100)
    with contextlib.ExitStack() as stack:
        turns = []
        for priority, tenant, tokens in ((0, "a", 1), (1, "b", 10), (0, "b", 100), (0, "a", 1000), (0, "a", 10_000)):
            ticket = stack.enter_context(queue.admit(priority, tenant))
            turns.append(stack.enter_context(queue.turn(ticket, lambda: None, tokens)))
        before = [sorted(queue.prompts_before(turn)) for turn in turns]
        assert before == [[10], [], [10], [1, 10], [1, 10, 1000]]


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
    await asyncio.gather(first, asyncio.wait_for(release_chain(queue), 60))
    await second


async def release_chain(queue: AdmissionQueue) -> None:
    while queue.view().waiting:
        queue.wake()
        await asyncio.sleep(0)


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
        assert await turn.wait(30.0) is not None
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
            await turn.wait(30.0)
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


# --- tenants ----------------------------------------------------------------------------------------------------------


async def stay_as(queue: AdmissionQueue, rooms: Rooms, tenant: str, tokens: int, leave: asyncio.Event) -> None:
    with queue.admit(0, tenant) as ticket, queue.turn(ticket, lambda: rooms.take(tenant), tokens) as turn:
        assert await turn.wait(30) is not None
        await leave.wait()


async def test_a_replay_goes_before_those_that_have_not_run() -> None:
    queue, rooms, leave = AdmissionQueue(100), Rooms(1), asyncio.Event()
    leave.set()
    with queue.admit(0, "a") as ticket:
        with queue.turn(ticket, lambda: rooms.take("first attempt"), 1000) as turn:
            assert await turn.wait(30.0) is not None
            other = asyncio.create_task(stay(queue, rooms, "other", 0, leave))
            await settle()
        rooms.free = 0  # the worker is lost, with its room
        with queue.turn(ticket, lambda: rooms.take("replay"), 0) as turn:
            rooms.free = 1
            queue.wake()
            assert await turn.wait(30.0) is not None
    queue.wake()
    await other
    assert rooms.order == ["first attempt", "replay", "other"]


async def test_a_full_queue_makes_room_for_a_tenant_that_holds_less() -> None:
    queue, rooms = AdmissionQueue(4), Rooms(0)
    leave = asyncio.Event()
    flood = [asyncio.create_task(stay_as(queue, rooms, "flood", 1, leave)) for _ in range(4)]
    await settle()
    quiet = asyncio.create_task(stay_as(queue, rooms, "quiet", 1, leave))
    await settle()
    with pytest.raises(OverloadedError, match="try again in"):
        await flood.pop()  # the last of the flood
    with pytest.raises(OverloadedError):
        queue.admit(0, "flood")
    second = asyncio.create_task(stay_as(queue, rooms, "quiet", 1, leave))
    await settle()
    with pytest.raises(OverloadedError):
        await flood.pop()
    with pytest.raises(OverloadedError):
        queue.admit(0, "quiet")  # holds as many by now
    assert queue.view()[:2] == (4, 0)
    leave.set()
    rooms.free = 4
    queue.wake()
    await asyncio.gather(*flood, quiet, second)
    assert await queue.wait_empty(0.0) == 0


async def test_a_request_that_runs_never_makes_room() -> None:
    queue, rooms, leave = AdmissionQueue(2), Rooms(2), asyncio.Event()
    running = [asyncio.create_task(stay_as(queue, rooms, "a", 1, leave)) for _ in range(2)]
    await settle()
    with pytest.raises(OverloadedError):
        queue.admit(9, "b")
    leave.set()
    await asyncio.gather(*running)


async def test_all_choices_of_a_request_that_makes_room_are_refused() -> None:
    queue = AdmissionQueue(2)
    with queue.admit(0, "a"), queue.admit(0, "a") as ticket, contextlib.ExitStack() as turns:
        both = [turns.enter_context(queue.turn(ticket, lambda: None)) for _ in range(2)]
        with queue.admit(0, "b"):
            for turn in both:
                with pytest.raises(OverloadedError):
                    await turn.wait(0.0)
            with queue.turn(ticket, lambda: None) as late, pytest.raises(OverloadedError):
                await late.wait(0.0)
            assert queue.view()[:2] == (0, 0)
    assert await queue.wait_empty(0.0) == 0


async def test_a_request_whose_time_is_up_gets_no_workers_any_more() -> None:
    queue, rooms, leave = AdmissionQueue(10), Rooms(0), asyncio.Event()
    leave.set()
    ticket = queue.admit(deadline_s=time.monotonic() + 0.02)
    with ticket, queue.turn(ticket, lambda: rooms.take("late")) as turn:
        behind = asyncio.create_task(stay(queue, rooms, "behind", 0, leave))
        await asyncio.sleep(0.03)
        rooms.free = 1
        queue.wake()
        await behind
        assert await turn.wait(0.0) is None
    assert rooms.order == ["behind"]


@dataclass(frozen=True)
class Arrival:
    tenant: str
    priority: int
    tokens: int
    stays: int  # rounds


ARRIVALS = st.builds(Arrival, st.sampled_from("abc"), st.integers(0, 1), st.integers(1, 500), st.integers(0, 3))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(ARRIVALS, max_size=6), max_size=12), st.integers(1, 4), st.integers(3, 12))
def test_whatever_comes_the_bounds_hold_and_nothing_is_left(
    rounds: list[list[Arrival]], num_rooms: int, limit: int
) -> None:
    async def run() -> None:
        queue, rooms = AdmissionQueue(limit), Rooms(num_rooms)
        outcomes: list[str] = []

        async def visit(arrival: Arrival) -> None:
            try:
                with queue.admit(arrival.priority, arrival.tenant) as ticket:
                    with queue.turn(ticket, lambda: rooms.take(arrival.tenant), arrival.tokens) as turn:
                        assert await turn.wait(30) is not None
                        for _ in range(10 * arrival.stays):
                            await asyncio.sleep(0)
                    queue.wake()
                outcomes.append("served")
            except OverloadedError:
                outcomes.append("refused")

        tasks = []
        for arrivals in rounds:
            for arrival in arrivals:
                tasks.append(asyncio.create_task(visit(arrival)))
                await asyncio.sleep(0)
                waiting, running, *_ = queue.view()
                assert running <= num_rooms
                assert waiting + running <= limit
            await settle()
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks)
        assert len(outcomes) == sum(map(len, rounds))
        assert rooms.free == num_rooms
        assert queue.view()[:2] == (0, 0)
        assert await queue.wait_empty(0.0) == 0

    asyncio.run(run())
