import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import Any

import msgspec
import pytest

from baton_proto.discovery import WorkerLoad
from baton_proto.planner import MAJOR, Holds, Target
from baton_proto.planner_control import Plan
from baton_proto.token_counts import TokenCounts
from baton_proto.worker import Handoff
from router.counters.tally import RequestTally
from router.ui import feed as feed_module
from router.ui.feed import INTERVAL_S, KEPT, MAX_VIEWERS
from tests.router.ui.crowd import BLOCKS, Crowd


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "INTERVAL_S", 0.02)
    monkeypatch.setattr(feed_module, "PLANNER_S", 0.02)


@pytest.fixture
async def crowd() -> AsyncIterator[Crowd]:
    crowd = Crowd(1, 2)
    await crowd.feed.start()
    yield crowd
    await crowd.feed.close()


async def following(messages: AsyncGenerator[bytes, None]) -> list[dict[str, Any]]:
    async with asyncio.timeout(60):
        data = await anext(messages)
    return [msgspec.json.decode(event.removeprefix(b"data: ")) for event in data.removesuffix(b"\n\n").split(b"\n\n")]


async def until(messages: AsyncGenerator[bytes, None], field: str) -> dict[str, Any]:
    """The next message that says something of it."""
    while True:
        for event in await following(messages):
            if event.get(field):
                return event


async def test_who_begins_gets_everything_and_then_what_has_changed(crowd: Crowd) -> None:
    async with aclosing(crowd.feed.messages()) as messages:
        (first,) = await following(messages)
        fields = first["about"]["fields"]["workers"]
        name = fields.index("worker_id")
        assert [row[name] for row in first["workers"]] == ["prefill-1", "decode-1", "decode-2"]
        assert dict(zip(fields, first["workers"][1], strict=True))["blocks_total"] == BLOCKS
        (second,) = await following(messages)
        assert {"about", "workers", "requests"}.isdisjoint(second)
        crowd.ledger.report(("decode-2", 1), WorkerLoad(running=7, blocks_total=BLOCKS))
        (changed,) = (await until(messages, "workers"))["workers"]
        assert (changed[name], changed[fields.index("running")]) == ("decode-2", 7)
        del crowd.pool.workers["decode-1"]
        assert (await until(messages, "gone"))["gone"] == ["decode-1"]


async def test_all_viewers_get_the_same_bytes(crowd: Crowd) -> None:
    async with aclosing(crowd.feed.messages()) as one, aclosing(crowd.feed.messages()) as other:
        first, second = await asyncio.gather(anext(one), anext(other))
        assert first is second


async def test_a_viewer_who_reads_slowly_gets_what_it_missed_or_else_everything(crowd: Crowd) -> None:
    async with aclosing(crowd.feed.messages()) as slow, aclosing(crowd.feed.messages()) as quick:
        await following(slow)
        for _ in range(3):
            await following(quick)
        missed = await following(slow)
        assert len(missed) >= 2
        assert all("about" not in event for event in missed)
        for _ in range(KEPT + 2):
            await following(quick)
        (whole,) = await following(slow)
        assert len(whole["workers"]) == 3


async def test_while_nobody_watches_only_the_curves_go_on(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    async def asked() -> tuple[list[Any], list[str]]:
        raise AssertionError("somebody asked for the workers")

    ticked = asyncio.Event()
    sample = crowd.feed._history.sample

    def sampled(*facts: Any) -> Any:
        if len(crowd.feed._history.points) > 3:
            ticked.set()
        return sample(*facts)

    monkeypatch.setattr(crowd.feed._workers, "changes", asked)
    monkeypatch.setattr(crowd.feed._history, "sample", sampled)
    async with asyncio.timeout(60):
        await ticked.wait()


async def test_transfers_are_added_up_by_pair(crowd: Crowd) -> None:
    async with aclosing(crowd.feed.messages()) as messages:
        await following(messages)
        for _ in range(3):
            crowd.metrics.recent.handed_over("decode-1", Handoff("prefill-1", 2, 1000, "shm", TokenCounts()))
        crowd.metrics.recent.handed_over("decode-2", Handoff("prefill-1", 2, 5000, "tcp", TokenCounts()))
        told = await until(messages, "transfers")
        assert told["transfers"] == [
            ["prefill-1", "decode-2", "tcp", 1, 5000],
            ["prefill-1", "decode-1", "shm", 3, 3000],
        ]
        assert told["points"][0][4] > 0


async def test_requests_are_listed_as_they_come_and_end(crowd: Crowd) -> None:
    async with aclosing(crowd.feed.messages()) as messages:
        (first,) = await following(messages)
        fields = first["about"]["fields"]["requests"]
        with RequestTally(crowd.metrics, "mine-0123abcd", 12) as tally:
            tally.choice(0)
            (line,) = (await until(messages, "requests"))["requests"]
            running = dict(zip(fields, line, strict=True))
            assert (running["request_id"], running["prompt_tokens"], running["outcome"]) == ("mine-0123abcd", 12, "")
        (line,) = (await until(messages, "requests"))["requests"]
        assert line[fields.index("outcome")] == "completed"


async def test_the_planners_decisions_are_told_once_and_its_silence_is_explained(crowd: Crowd) -> None:
    async with aclosing(crowd.feed.messages()) as messages:
        assert (await until(messages, "no_plan"))["no_plan"] == "no planner runs here"
        target = Target(MAJOR, 1000.0, "slo", 2, 3, [], ["load rises"])
        crowd.plan = Plan(0.1, None, target, [], Holds())
        told = await until(messages, "decisions")
        assert (told["decisions"][0]["prefill"], told["decisions"][0]["reasons"]) == (2, ["load rises"])
        for _ in range(4):
            (event,) = await following(messages)
            assert "decisions" not in event
        assert event["plan"]["decode"] == 3
        assert event["points"][0][-2:] == [2, 3]


async def test_the_number_of_viewers_is_bounded_and_their_leaving_makes_room(crowd: Crowd) -> None:
    viewers = [crowd.feed.messages() for _ in range(MAX_VIEWERS)]
    await asyncio.gather(*(following(viewer) for viewer in viewers))
    assert crowd.feed.full
    await viewers[0].aclose()
    assert not crowd.feed.full
    for viewer in viewers:
        await viewer.aclose()


async def test_who_comes_takes_the_place_of_who_reads_nothing_or_else_of_who_came_first(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[int] = []
    viewers = [crowd.feed.messages(partial(dropped.append, number)) for number in range(MAX_VIEWERS)]
    await asyncio.gather(*(following(viewer) for viewer in viewers))
    assert (crowd.feed.make_room(), dropped) == (False, []), "all read, and have come just now"
    for _ in range(KEPT + 1):
        reading = [asyncio.create_task(anext(viewer)) for viewer in viewers if viewer is not viewers[7]]
        await asyncio.sleep(0)
        await crowd.feed._tick()
        await asyncio.gather(*reading)
    assert (crowd.feed.make_room(), dropped, crowd.feed.full) == (True, [7], False)
    assert crowd.feed.make_room() is False
    monkeypatch.setattr(feed_module, "SETTLED_S", 0.0)
    assert (crowd.feed.make_room(), dropped) == (True, [7, 0])
    for viewer in viewers:
        await viewer.aclose()


@pytest.mark.parametrize("viewers", [1, MAX_VIEWERS])
async def test_a_viewer_of_a_thousand_workers_costs_at_most_2_percent_of_a_core_and_all_together_no_more(
    viewers: int,
) -> None:
    """The least CPU time of this thread, so that it hardly matters what else runs on the machine."""
    crowd = Crowd(300, 700)
    async with AsyncExitStack() as watching:
        watched = [await watching.enter_async_context(aclosing(crowd.feed.messages())) for _ in range(viewers)]
        costs_s = []
        for _ in range(9):
            crowd.stir()
            waiting = [asyncio.create_task(anext(messages)) for messages in watched]
            await asyncio.sleep(0)  # until all of them wait
            began_s = time.thread_time()
            await crowd.feed._tick()
            told = await asyncio.gather(*waiting)
            costs_s.append(time.thread_time() - began_s)
            assert all(message.count(b"decode-700") for message in told)
    assert min(costs_s) <= 0.02 * INTERVAL_S


async def test_streams_end_with_the_router(crowd: Crowd) -> None:
    async with aclosing(crowd.feed.messages()) as messages:
        await following(messages)
        await crowd.feed.close()
        async with asyncio.timeout(60):
            with pytest.raises(StopAsyncIteration):
                await anext(messages)
