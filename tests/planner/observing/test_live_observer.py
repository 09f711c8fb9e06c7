"""What the live observer makes of what routers and workers say, over a real NATS server."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest
from msgspec.structs import replace

from baton.service.launcher import Machines
from baton.service.local.nats_server import NatsServer
from baton.service.planning.budget import gpu_budget, gpus_per_worker
from baton_proto.discovery import MAJOR, LoadReport, TimedStep, WorkerLoad, WorkerRecord
from baton_proto.planner import DECODE, PREFILL, Holds, Observation, Role, StepSample, WorkerView
from baton_proto.routers.router_report import (
    BUCKETS,
    RouterQueue,
    RouterReport,
    RouterTotals,
    bucket_of,
    encode_router_report,
)
from planner.acting.connector import WorkerProcess
from planner.observing.live_observer import LiveObserver
from planner.observing.router_board import RouterBoard
from planner.observing.worker_board import WorkerBoard
from planner.policy import pace
from runtime.config.serving import ServingConfig
from runtime.discovery.directory import Announcer
from runtime.discovery.load_board import publish_load
from runtime.discovery.worker_key import new_incarnation
from runtime.errors import UnavailableError
from runtime.nats.client import NatsClient
from runtime.nats.subjects import router_subject

WAIT_S = 30.0
CONFIG = ServingConfig()
GPUS: dict[Role, int] = {PREFILL: 4, DECODE: 2}


async def say(nats: NatsClient, router_id: str, uptime_s: float, leaving: bool = False, **totals: object) -> None:
    queue = RouterQueue(waiting=2, prompt_tokens=200, oldest_s=uptime_s / 10)
    report = RouterReport(1, router_id, 7, uptime_s, queue, RouterTotals(**totals), leaving)  # type: ignore[arg-type]
    await nats.publish(router_subject(nats.namespace, router_id), encode_router_report(report))


def histogram(**counts: int) -> list[int]:
    """Such as _200=9: nine of 200 ms."""
    result = [0] * BUCKETS
    for name, count in counts.items():
        result[bucket_of(float(name.strip("_")))] = count
    return result


def record(worker_id: str, role: Role, incarnation: int) -> WorkerRecord:
    address = "127.0.0.1:1"
    return WorkerRecord(MAJOR, worker_id, incarnation, role, "ready", address, None, "tiny", "0", 16, 100, 1600, 1)


class TestRouters:
    async def test_several_are_added_up_and_a_message_that_is_lost_changes_nothing(self, nats: NatsClient) -> None:
        board = RouterBoard(nats)
        await board.start()
        await say(nats, "a", 10.0, arrivals=100, input_tokens=1000, ttft=histogram(_50=100))
        await say(nats, "b", 3.0)
        await nats.flush()
        assert board.take_interval([]) is None, "nothing is known of the time before"
        await say(nats, "a", 11.0, arrivals=999, input_tokens=9_999)  # as if it were lost: the next one says it all
        await say(nats, "a", 12.0, arrivals=110, input_tokens=1500, finished=4, ttft=histogram(_50=101, _400=9))
        await say(nats, "b", 5.0, arrivals=6, input_tokens=60, prompt_tokens=100, cached_tokens=25)
        await nats.flush()
        interval = board.take_interval([])
        assert interval is not None
        assert (interval.duration_s, interval.arrivals, interval.input_tokens, interval.finished) == (2.0, 16, 560, 4)
        assert interval.ttft_p50_ms == pytest.approx(400, rel=0.06), "what came before does not count"
        assert interval.itl_p90_ms is None
        queue = board.queue()
        assert (queue.waiting, queue.prefill_tokens, queue.oldest_s) == (4, round(400 * 0.75), 1.2)
        assert board.take_interval([]) is None

    async def test_the_last_word_of_one_that_leaves_counts_once_and_its_queue_no_more(self, nats: NatsClient) -> None:
        board = RouterBoard(nats)
        await board.start()
        await say(nats, "a", 1.0)
        await say(nats, "a", 2.0, leaving=True, arrivals=5)
        await nats.flush()
        assert board.waiting() == 0
        interval = board.take_interval([])
        assert interval is not None
        assert interval.arrivals == 5
        assert board.take_interval([]) is None


class TestWorkers:
    async def test_processes_and_discovery_make_one_picture(self, nats: NatsClient) -> None:
        """Announced, starting, flipping, and one that nobody here has started."""
        born = new_incarnation()
        processes = [
            WorkerProcess("decode-1", DECODE, 50.0),
            WorkerProcess("prefill-2", PREFILL, 60.0),
            WorkerProcess("prefill-3", DECODE, 70.0, leaving="flip"),
        ]
        async with AsyncExitStack() as closing:
            board = await worker_board(nats, closing, lambda: processes)
            for one in (record("decode-1", DECODE, born), record("prefill-3", PREFILL, born), record("x", DECODE, 9)):
                await announce(nats, closing, one)
            load = WorkerLoad(running=3, waiting=1, blocks_used=20)
            step = TimedStep(0, 0.0, 3, 99, 7.5)
            await publish_load(
                nats,
                LoadReport(
                    version=MAJOR, worker_id="decode-1", incarnation=born, load=load, context_tokens=123, steps=[step]
                ),
            )
            await nats.flush()
            views = {view.worker_id: view for view in board.views()}
            assert views["decode-1"] == WorkerView(
                "decode-1", DECODE, "ready", born / 1e6, born / 1e6, gpus=2, running=3, max_running=64, waiting=1,
                kv_used=0.2, kv_tokens=1600, context_tokens=123,
            )  # fmt: skip
            assert views["prefill-2"] == WorkerView("prefill-2", PREFILL, "starting", 60.0, gpus=4)
            flipping = views["prefill-3"]
            assert (flipping.role, flipping.effect, flipping.gpus) == (DECODE, "flip", 2), (
                "the role that it had, until it is done"
            )
            assert views["x"].state == "ready"
            (sample,) = board.take_steps()
            assert sample == StepSample("decode-1", sample.ready_for_s, 0, 0, 3, 99, 7.5)
            assert 0 <= sample.ready_for_s < WAIT_S
            assert board.kv_load() == pytest.approx((0.2 + 0.02) / 2)
            assert board.take_steps() == []

    async def test_a_process_that_lives_and_is_heard_no_more_counts_as_starting_since_then(
        self, nats: NatsClient
    ) -> None:
        async with AsyncExitStack() as closing:
            board = await worker_board(nats, closing, lambda: [WorkerProcess("decode-1", DECODE, 50.0)])
            announcer = await announce(nats, closing, record("decode-1", DECODE, new_incarnation()))
            await nats.flush()
            assert [view.state for view in board.views()] == ["ready"]
            await announcer.set_state("draining")
            await nats.flush()
            assert [view.state for view in board.views()] == ["draining"]
            before_s = time.time()
            await announcer.withdraw()
            await nats.flush()
            (view,) = board.views()
            assert view.state == "starting"
            assert view.since_s >= before_s


class TestObserving:
    async def test_it_raises_while_nothing_is_new_and_shows_the_ages_when_that_is_too_old(
        self, nats: NatsClient, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pace, "STALE_S", 2.0)
        observer = LiveObserver(nats, CONFIG, tuple, 4, GPUS, lambda: Holds(prefill=2))
        starting = asyncio.create_task(observer.start())
        try:
            await until_said(nats, starting, 1.0)
            observing = asyncio.create_task(observer())
            await say(nats, "a", 2.0, arrivals=3)
            observation = await observing
            assert (observation.interval.arrivals, observation.gpu_budget, observation.holds.prefill) == (3, 4, 2)
            assert observation.ages_s.keys() == {"routers", "discovery"}, "no worker was ever heard"
            with pytest.raises(UnavailableError, match="no router has said anything since the last observation"):
                await observer()
            await nats_server.stop()
            observation = await when_stale(observer)
            assert observation.ages_s["routers"] > 2.0
            assert observation.ages_s["discovery"] > 1.0
            assert observation.interval.arrivals == 0
        finally:
            await observer.close()


def test_the_budget_is_what_the_configuration_says_or_what_is_here() -> None:
    limits = CONFIG.planner.limits
    machines = Machines(gpus=0, cores=6)
    assert gpu_budget(ServingConfig(model="mock"), machines) == limits.max_prefill + limits.max_decode
    given = replace(CONFIG.planner, limits=replace(limits, gpu_budget=3))
    assert gpu_budget(ServingConfig(model="mock", planner=given), machines) == 3
    on_cpu = ServingConfig(engine=replace(CONFIG.engine, device="cpu"))
    assert gpu_budget(on_cpu, machines) == 6
    tensor_parallel = ServingConfig(engine=replace(CONFIG.engine, tensor_parallel=2, prefill_tensor_parallel=4))
    assert gpus_per_worker(tensor_parallel, machines) == {PREFILL: 1, DECODE: 1}
    with_gpus = replace(machines, gpus=8)
    assert gpu_budget(tensor_parallel, with_gpus) == 8
    assert gpus_per_worker(tensor_parallel, with_gpus) == {PREFILL: 4, DECODE: 2}


async def when_stale(observer: LiveObserver) -> Observation:
    """What until_said() said once too often may still be news, which ends a wait."""
    while True:
        try:
            return await observer()
        except UnavailableError:
            continue


async def until_said(nats: NatsClient, starting: "asyncio.Task[None]", uptime_s: float) -> None:
    """Says it until somebody has heard it."""
    async with asyncio.timeout(WAIT_S):
        while not starting.done():
            await say(nats, "a", uptime_s)
            await asyncio.sleep(0.02)
    await starting


async def worker_board(
    nats: NatsClient, closing: AsyncExitStack, processes: Callable[[], list[WorkerProcess]]
) -> WorkerBoard:
    board = WorkerBoard(nats, CONFIG, processes, GPUS)
    await board.start()
    closing.push_async_callback(board.close)
    return board


async def announce(nats: NatsClient, closing: AsyncExitStack, one: WorkerRecord) -> Announcer:
    announcer = Announcer(nats, one, 0.5, 4.0)
    await announcer.start()
    closing.push_async_callback(announcer.withdraw)
    return announcer
