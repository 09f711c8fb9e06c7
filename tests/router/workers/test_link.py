"""The link to one worker: dispatch, loss, reconnecting, and refusing what is not the expected worker."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from baton_proto.discovery import WorkerLoad
from baton_proto.sampling import SamplingParams
from baton_proto.worker import MAJOR, STEPS, Cancel, Delta, Hello, Submit
from router.workers.inbox import Inbox
from router.workers.link import WorkerLink
from router.workers.pace import Pace
from runtime.errors import WorkerLostError
from runtime.security.cluster_key import new_cluster_key
from runtime.streams.message_stream import MessageStream
from tests.router.scripted_worker import ScriptedWorker, answer, answer_until, greedy
from worker.stream_server import StreamServer

PROMPT = list(range(50, 70))


def submit(request_id: str = "r", max_tokens: int = 5) -> Submit:
    token_ids = np.array(PROMPT, dtype="<u4").tobytes()
    return Submit(request_id, token_ids, len(PROMPT), SamplingParams(max_tokens=max_tokens), timeout_s=60)


class Watched:
    """A link whose changes and loads can be awaited."""

    def __init__(self, worker: ScriptedWorker, pace: Pace | None = None) -> None:
        self.loads: list[WorkerLoad] = []
        self._news = asyncio.Event()
        self.link = WorkerLink(worker.record(), "router-0", self._load, self._news.set, pace=pace)

    def _load(self, load: WorkerLoad) -> None:
        self.loads.append(load)
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def connected(self) -> None:
        await self.until(lambda: self.link.connected)


@asynccontextmanager
async def linked(worker: ScriptedWorker, pace: Pace | None = None) -> AsyncIterator[Watched]:
    watched = Watched(worker, pace)
    try:
        yield watched
    finally:
        await watched.link.close("the test is over")


async def read(inbox: Inbox) -> list[int]:
    """Until the last delta."""
    token_ids: list[int] = []
    while True:
        for delta in await inbox.take():
            token_ids += delta.token_ids
            if delta.finish is not None:
                return token_ids


async def test_requests_on_one_stream_get_their_own_tokens() -> None:
    async with ScriptedWorker("d0") as worker, linked(worker) as watched:
        await watched.connected()
        inboxes = [watched.link.submit(submit(f"r{n}", max_tokens=n)) for n in range(1, 20)]
        answers = await asyncio.gather(*map(read, inboxes))
        assert answers == [greedy(PROMPT, n) for n in range(1, 20)]
        assert watched.link.in_flight == 0
        assert worker.connections == 1


async def test_the_load_of_every_step_is_passed_on() -> None:
    async with ScriptedWorker("d0") as worker, linked(worker) as watched:
        await watched.connected()
        worker.report(WorkerLoad(running=3))
        await watched.until(lambda: watched.loads == [WorkerLoad(running=3)])


async def test_a_cancelled_request_hears_nothing_more_and_the_worker_is_told() -> None:
    async def slow(worker: ScriptedWorker, request: Submit) -> None:
        await answer_until(worker, request, 1)

    async with ScriptedWorker("d0", script=slow) as worker, linked(worker) as watched:
        await watched.connected()
        inbox = watched.link.submit(submit())
        await inbox.take()
        watched.link.cancel("r")
        await worker.until(lambda: worker.cancels == ["r"])
        worker.send(Delta("r", token_ids=[1]))
        worker.report(WorkerLoad(running=1))
        await watched.until(lambda: watched.loads[-1].running == 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(inbox.take(), 0.01)


async def test_a_dying_worker_fails_its_requests_at_once_and_what_it_said_before_is_kept() -> None:
    async def half(worker: ScriptedWorker, request: Submit) -> None:
        await answer_until(worker, request, 2)

    async with ScriptedWorker("d0", script=half) as worker, linked(worker) as watched:
        await watched.connected()
        inbox = watched.link.submit(submit())
        token_ids: list[int] = []
        while len(token_ids) < 2:
            for delta in await inbox.take():
                token_ids += delta.token_ids
        await worker.die()
        with pytest.raises(WorkerLostError, match="d0"):
            await asyncio.wait_for(inbox.take(), 60)
        assert token_ids == greedy(PROMPT, 2)
        assert not watched.link.connected
        with pytest.raises(WorkerLostError, match="not connected"):
            watched.link.submit(submit("later"))


@pytest.mark.parametrize("end", ["all told", "cancelled", "cancelled when all is told", "worker lost"])
async def test_only_answers_that_have_begun_and_not_ended_count_for_the_pace(end: str) -> None:
    async def half(worker: ScriptedWorker, request: Submit) -> None:
        await answer_until(worker, request, 2)

    pace = Pace()
    script = half if end in ("cancelled", "worker lost") else None
    async with ScriptedWorker("d0", script=script or answer) as worker, linked(worker, pace) as watched:
        await watched.connected()
        inbox = watched.link.submit(submit())
        assert pace.num_requests == 0
        if script is None:
            await read(inbox)
        else:
            await inbox.take()
            assert pace.num_requests == 1
        if end == "worker lost":
            await worker.die()
            await watched.until(lambda: not watched.link.connected)
        elif end != "all told":
            watched.link.cancel("r")
            watched.link.cancel("r")
        assert pace.num_requests == 0


async def test_the_link_dials_again_until_the_worker_is_back() -> None:
    async with ScriptedWorker("d0") as worker, linked(worker) as watched:
        await watched.connected()
        await worker.die()
        await watched.until(lambda: not watched.link.connected)
        await worker.start()
        await watched.connected()
        assert await read(watched.link.submit(submit())) == greedy(PROMPT, 5)


async def test_an_unread_answer_survives_the_loss_of_its_worker() -> None:
    inbox = Inbox(Pace())
    inbox.put(Delta("r", token_ids=[1]), at_once=True)
    inbox.fail(WorkerLostError("d0", "gone"))
    inbox.put(Delta("r", token_ids=[2]), at_once=True)
    assert [delta.token_ids for delta in await inbox.take()] == [[1], [2]]
    with pytest.raises(WorkerLostError):
        await inbox.take()


@pytest.mark.parametrize(
    "hello",
    [Hello(MAJOR, "d0", 2), Hello(MAJOR, "other", 1), Hello(MAJOR + 1, "d0", 1)],
    ids=["another incarnation", "another worker", "another version"],
)
async def test_a_worker_that_is_not_the_expected_one_is_not_used(hello: Hello) -> None:
    async with ScriptedWorker("d0") as worker:
        worker.hello = hello
        async with linked(worker) as watched:
            await worker.until(lambda: worker.connections == 2)
            assert not watched.link.connected


async def test_a_worker_that_runs_as_another_incarnation_refuses_the_stream() -> None:
    async with ScriptedWorker("d0", incarnation=2) as worker:
        worker.incarnation = 1
        watched = Watched(worker)
        worker.incarnation = 2
        await worker.until(lambda: worker.refusals >= 2)
        assert (worker.connections, watched.link.connected) == (0, False)
        await watched.link.close("the test is over")


async def test_a_message_that_cannot_be_decoded_ends_the_stream_and_not_the_link() -> None:
    async with ScriptedWorker("d0", script=_silent) as worker, linked(worker) as watched:
        await watched.connected()
        inbox = watched.link.submit(submit())
        worker.send_any(Cancel("r"))
        with pytest.raises(WorkerLostError, match="cannot be decoded"):
            await asyncio.wait_for(inbox.take(), 60)
        await watched.connected()
        assert worker.connections == 2


async def _silent(worker: ScriptedWorker, request: Submit) -> None:
    pass


async def test_unary_calls_and_snapshots() -> None:
    async with ScriptedWorker("d0") as worker, linked(worker) as watched:
        await watched.connected()
        assert (await watched.link.client.inspect()).worker_id == "d0"
        assert (await watched.link.client.drain(1.0)).remaining == 0
        chunks = [chunk async for chunk in watched.link.client.snapshot(1.0)]
        assert [(chunk.event_id, len(chunk.runs), chunk.last) for chunk in chunks] == [(7, 1, False), (7, 0, True)]
        await worker.die()
        with pytest.raises(WorkerLostError):
            await watched.link.client.inspect(1.0)
        with pytest.raises(WorkerLostError):
            [chunk async for chunk in watched.link.client.snapshot(1.0)]


async def test_a_worker_with_another_cluster_key_is_not_used_and_that_is_said_once() -> None:
    async def nobody(stream: MessageStream, sender: str) -> None:
        raise AssertionError("was let in")

    server = StreamServer(Hello(MAJOR, "decode-0", 1), {STEPS: nobody}, new_cluster_key())
    record = replace(ScriptedWorker("decode-0").record(), stream_address=await server.start("127.0.0.1"))
    with capture_logs() as logs:
        link = WorkerLink(record, "router-0", lambda load: None, lambda: None, new_cluster_key())
        async with asyncio.timeout(60):
            while sum(log["event"] == "stranger turned away" for log in logs) < 3:
                await asyncio.sleep(0.05)
        await link.close("the test is over")
    assert link.failed
    (said,) = [log for log in logs if log["event"] == "worker not used" and log["log_level"] == "warning"]
    assert "its cluster key or its security.internal_tls is not ours" in said["reason"]
    await server.stop(0.1)
