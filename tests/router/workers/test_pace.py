"""When tokens go on to clients: at once with few requests, in turns with many, and the first and last at once."""

import asyncio

import pytest

from baton_proto.token_counts import TokenCounts
from baton_proto.worker import Delta
from router.workers.inbox import Inbox
from router.workers.pace import AT_A_TIME, PER_REQUEST_S, SHORTEST_S, Pace

FEW = int(SHORTEST_S / PER_REQUEST_S)


def paced(num_requests: int) -> Pace:
    pace = Pace()
    pace.num_requests = num_requests
    return pace


async def test_tokens_of_few_requests_go_on_at_once() -> None:
    pace = paced(FEW)
    assert all(pace.takes() for _ in range(100))


async def test_tokens_of_many_requests_wait_for_their_turn_and_then_go_on_together() -> None:
    pace, loop = paced(400), asyncio.get_running_loop()
    one, other = Inbox(pace), Inbox(pace)
    assert pace.takes()
    began_s = loop.time()
    readers = [asyncio.create_task(inbox.take()) for inbox in (one, other)]
    await asyncio.sleep(0)
    for token_id in range(3):
        at_once = pace.takes()
        one.put(Delta("one", [token_id]), at_once=at_once)
        other.put(Delta("other", [token_id]), at_once=at_once)
    taken = await asyncio.wait_for(asyncio.gather(*readers), 60)
    assert [[delta.token_ids for delta in deltas] for deltas in taken] == [[[0], [1], [2]]] * 2
    assert loop.time() - began_s >= 400 * PER_REQUEST_S - 0.002  # uvloop's timers may ring a little early


@pytest.mark.parametrize(
    "delta", [Delta("r", [7], prompt_counts=TokenCounts()), Delta("r", [7], finish="stop")], ids=["first", "last"]
)
async def test_a_first_or_last_token_waits_for_no_turn(delta: Delta) -> None:
    pace = paced(10**9)  # whose turn comes in a day
    inbox = Inbox(pace)
    assert pace.takes()
    reader = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    inbox.put(Delta("r", [6]), at_once=pace.takes())
    inbox.put(delta, at_once=pace.takes())
    assert [one.token_ids for one in await asyncio.wait_for(reader, 60)] == [[6], [7]]
    inbox.put(Delta("r", [8]), at_once=pace.takes())  # held anew
    assert [one.token_ids for one in await inbox.take()] == [[8]]  # a reader that asks by itself waits for no turn


async def test_tokens_that_nobody_follows_leave_when_the_turn_comes() -> None:
    pace = paced(200)
    inbox = Inbox(pace)
    assert pace.takes()
    reader = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    inbox.put(Delta("r", [6]), at_once=pace.takes())
    assert [one.token_ids for one in await asyncio.wait_for(reader, 60)] == [[6]]


async def test_a_turn_in_which_all_has_been_read_wakes_nobody() -> None:
    pace = paced(200)
    inbox = Inbox(pace)
    assert pace.takes()
    inbox.put(Delta("r", [6]), at_once=pace.takes())
    assert len(await inbox.take()) == 1
    reader = asyncio.create_task(inbox.take())
    other = Inbox(pace)
    other.put(Delta("other", [1]), at_once=False)
    assert len(await asyncio.wait_for(other.take(), 60)) == 1
    await asyncio.sleep(300 * PER_REQUEST_S)  # the turn has come
    assert not reader.done()
    inbox.put(Delta("r", [7], finish="stop"), at_once=False)
    assert [one.token_ids for one in await asyncio.wait_for(reader, 60)] == [[7]]


async def test_a_thousand_that_hurry_are_woken_over_turns_of_the_loop() -> None:
    pace, woken = Pace(), list[int]()
    inboxes = [Inbox(pace) for _ in range(10 * AT_A_TIME)]

    async def read(number: int) -> None:
        await inboxes[number].take()
        woken.append(number)

    readers = [asyncio.create_task(read(number)) for number in range(len(inboxes))]
    await asyncio.sleep(0)
    for inbox in inboxes:
        inbox.put(Delta("r", [7], prompt_counts=TokenCounts()), at_once=True)
    seen = []
    while not all(reader.done() for reader in readers):
        before = len(woken)
        await asyncio.sleep(0)
        seen.append(len(woken) - before)
    assert woken == [*range(len(inboxes))]
    assert max(seen) <= AT_A_TIME
