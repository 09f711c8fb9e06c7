import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from engine.blocks.block_manager import BlockManager
from engine.core.engine import Engine
from engine.runners.mock_runner import MockRunner
from engine.runners.timed_loop import TimedLoop
from engine.sequences.output import StepOutput
from runtime.config.step_times import StepTimes
from runtime.errors import UnavailableError
from tests.engine.kv_oracle import make_sequence

STEP_S = 0.1


class Harness:
    """A loop whose steps all take STEP_S."""

    def __init__(self, step_s: float = STEP_S) -> None:
        config = StepTimes(
            prefill_floor_ms=step_s * 1e3,
            prefill_token_ms=0,
            prefill_pair_ms=0,
            decode_floor_ms=step_s * 1e3,
            decode_sequence_ms=0,
            decode_token_ms=0,
        )
        runner = MockRunner(config, 64, [10, 11, 12], 2)
        self.engine = Engine(
            runner,
            BlockManager(64, 4),
            max_batch_tokens=64,
            max_running=8,
            eos_token_ids=frozenset({2}),
            clock=runner.clock,
        )
        self.steps: list[tuple[float, StepOutput]] = []
        self.finished = asyncio.Event()
        self.loop = TimedLoop(self.engine, self.on_step)

    def on_step(self, output: StepOutput) -> None:
        self.steps.append((time.monotonic(), output))
        if any(one.finish for one in output.outputs):
            self.finished.set()


@asynccontextmanager
async def running(step_s: float = STEP_S) -> AsyncIterator[Harness]:
    harness = Harness(step_s)
    harness.loop.start()
    yield harness
    await asyncio.to_thread(harness.loop.stop)
    assert harness.loop.ended.result() is None


async def test_outputs_come_when_their_step_is_over() -> None:
    async with running() as harness:
        began_s = time.monotonic()
        harness.loop.call(lambda engine: engine.add(make_sequence("a", [1, 2, 3], max_tokens=5)))
        await asyncio.wait_for(harness.finished.wait(), 30)
        times_s = [at_s - began_s for at_s, _ in harness.steps]
        assert len(times_s) >= 5
        for number, at_s in enumerate(times_s[:5], 1):
            assert at_s >= number * STEP_S - 0.005


async def test_what_is_asked_for_in_mid_step_waits_for_its_end() -> None:
    async with running() as harness:
        harness.loop.call(lambda engine: engine.add(make_sequence("a", [1, 2, 3], max_tokens=50)))
        await asyncio.sleep(STEP_S / 4)
        began = len(harness.steps)
        seen = await asyncio.wrap_future(harness.loop.call(lambda engine: len(harness.steps)))
        assert began == 0
        assert seen == 1
        harness.loop.call(lambda engine: engine.abort("a"))


async def test_an_idle_engine_publishes_what_a_call_changed() -> None:
    async with running() as harness:
        harness.loop.call(lambda engine: engine.add(make_sequence("a", range(10), max_tokens=1)))
        await asyncio.wait_for(harness.finished.wait(), 30)
        harness.steps.clear()
        await asyncio.wrap_future(harness.loop.call(lambda engine: engine.clear_cache()))
        await asyncio.sleep(STEP_S)
        assert [len(output.events) for _, output in harness.steps] == [1]


async def test_calls_come_from_any_thread_and_run_on_the_event_loop() -> None:
    async with running() as harness:
        thread = await asyncio.to_thread(lambda: harness.loop.call(lambda _: threading.get_ident()).result(30))
        assert thread == threading.get_ident()


async def test_steps_without_duration_leave_others_their_turn() -> None:
    async with running(0.0) as harness:
        harness.loop.call(lambda engine: engine.add(make_sequence("a", [1], max_tokens=50, ignore_eos=True)))
        turns = 0
        while not harness.finished.is_set():
            turns += 1
            await asyncio.sleep(0)
        assert turns > 20


async def test_a_stopped_loop_refuses_calls_and_a_running_step_is_dropped() -> None:
    harness = Harness(step_s=60.0)
    harness.loop.start()
    harness.loop.call(lambda engine: engine.add(make_sequence("a", [1, 2, 3])))
    await asyncio.sleep(0.01)
    began_s = time.monotonic()
    await asyncio.to_thread(harness.loop.stop)
    assert time.monotonic() - began_s < 30.0, "half a step"
    with pytest.raises(UnavailableError):
        await asyncio.wrap_future(harness.loop.call(lambda _: None))
    assert harness.steps == []


async def test_a_fault_in_the_bookkeeping_ends_the_loop() -> None:
    harness = Harness()
    harness.engine.step = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    harness.loop.start()
    with pytest.raises(ZeroDivisionError):
        await asyncio.wrap_future(harness.loop.ended)
