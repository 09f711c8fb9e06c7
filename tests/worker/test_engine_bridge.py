"""The way between event loop and engine, be that on a thread of its own or on the event loop, with a real engine and a
runner that makes tokens up."""

import asyncio
import functools
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton_proto.discovery import WorkerLoad
from baton_proto.sampling import SamplingParams
from engine.blocks.block_manager import BlockManager
from engine.core.engine import Engine
from engine.core.loop import EngineLoop
from engine.runners.timed_loop import TimedLoop
from engine.sequences.batch import Batch, LayerDone, SampledToken, StepDone
from engine.sequences.output import StepOutput
from engine.sequences.sequence import Sequence
from runtime.errors import UnavailableError
from worker.engine_bridge import EngineBridge

LoopKind = type[EngineLoop] | type[TimedLoop]


class CountingRunner:
    """Token 7, always."""

    num_layers = 1

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth

    def submit(self, batch: Batch, layer_done: LayerDone | None) -> StepDone:
        return StepDone([SampledToken(7, None) for item in batch.items if item.sample])


class History:
    """What arrived on the event loop, in order."""

    def __init__(self, kind: LoopKind, depth: int, gather_s: float) -> None:
        self.items: list[Any] = []
        self.threads: set[int] = set()
        self.finished = asyncio.Event()
        engine = Engine(
            CountingRunner(depth), BlockManager(64, 16), max_batch_tokens=64, max_running=8, eos_token_ids=frozenset()
        )
        self.bridge = EngineBridge(engine, functools.partial(kind, engine), self.on_step, gather_s=gather_s)

    def on_step(self, output: StepOutput, load: WorkerLoad) -> None:
        self.threads.add(threading.get_ident())
        for sequence_output in output.outputs:
            self.items.append(sequence_output.token_ids)
            if sequence_output.finish:
                self.items.append(load)
                self.finished.set()


@pytest.fixture(
    params=[(EngineLoop, 0, 0.0), (EngineLoop, 1, 0.03), (TimedLoop, 0, 0.03)], ids=["thread", "gathered", "event loop"]
)
async def history(request: pytest.FixtureRequest) -> AsyncIterator[History]:
    history = History(*request.param)
    history.bridge.start()
    yield history
    await history.bridge.stop(5)


def sequence(max_tokens: int) -> Sequence:
    return Sequence("r1", [1, 2, 3], 3, SamplingParams(max_tokens=max_tokens))


def num_tokens(items: list[Any]) -> int:
    return sum(len(item) for item in items if isinstance(item, list))


async def test_step_outputs_arrive_on_the_event_loop_with_the_load_of_their_moment(history: History) -> None:
    history.bridge.post(lambda engine: engine.add(sequence(3)))
    await asyncio.wait_for(history.finished.wait(), 30)
    *tokens, load = history.items
    assert tokens == [[7], [7], [7]]
    assert (load.running, load.steps, load.blocks_total) == (0, 3, 64)
    assert history.threads == {threading.get_ident()}


async def test_results_keep_their_place_among_the_steps(history: History) -> None:
    """A result that says how many steps had run arrives after exactly so many tokens."""
    history.bridge.post(lambda engine: engine.add(sequence(800)))
    for _ in range(50):
        history.bridge.post(lambda engine: ("steps", engine.load().steps), history.items.append)
        steps = await history.bridge.call(lambda engine: engine.load().steps)
        assert steps <= num_tokens(history.items)
    await asyncio.wait_for(history.finished.wait(), 60)
    for position, item in enumerate(history.items):
        if isinstance(item, tuple):
            assert item == ("steps", num_tokens(history.items[:position]))


async def test_what_work_raises_reaches_its_caller_and_the_engine_goes_on(history: History) -> None:
    with pytest.raises(ZeroDivisionError):
        await history.bridge.call(lambda _: 1 // 0)
    assert await history.bridge.call(lambda _: "alive") == "alive"


async def test_the_end_of_a_broken_engine_is_told(history: History) -> None:
    def break_down() -> StepOutput:
        raise RuntimeError("bookkeeping fault")

    history.bridge.post(lambda engine: setattr(engine, "step", break_down))
    with pytest.raises(RuntimeError, match="bookkeeping"):
        await asyncio.wait_for(history.bridge.ended(), 30)


async def test_posted_work_that_raises_is_a_fault_and_leaves_nobody_waiting(history: History) -> None:
    history.bridge.post(lambda _: 1 // 0, history.items.append)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(history.bridge.ended(), 60)


@pytest.mark.parametrize("kind", [EngineLoop, TimedLoop])
async def test_a_step_whose_owner_fails_on_it_is_a_fault_and_is_told_nevertheless(
    kind: LoopKind,
) -> None:
    history = History(kind, depth=0, gather_s=0.0)
    history.bridge._on_step_here = lambda output: output.outputs[0].no_such_field  # type: ignore[attr-defined]
    history.bridge.start()
    history.bridge.post(lambda engine: engine.add(sequence(1)))
    with pytest.raises(AttributeError):
        await asyncio.wait_for(history.bridge.ended(), 60)
    await asyncio.wait_for(history.finished.wait(), 60)
    await history.bridge.stop(5)


async def test_a_call_to_an_engine_that_has_stopped_does_not_hang(history: History) -> None:
    await history.bridge.stop(5)
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(history.bridge.call(lambda _: None), 30)
    await asyncio.wait_for(history.bridge.ended(), 30)


async def test_what_other_threads_ask_for_is_done_too(history: History) -> None:
    await asyncio.to_thread(history.bridge.post, lambda engine: engine.add(sequence(3)))
    await asyncio.wait_for(history.finished.wait(), 30)
    assert history.threads == {threading.get_ident()}


async def test_quick_steps_reach_the_event_loop_together_and_each_ones_time_is_told() -> None:
    history = History(EngineLoop, depth=1, gather_s=0.2)
    told: list[StepOutput] = []
    history.bridge._on_step = lambda output, load: (told.append(output), history.on_step(output, load))  # type: ignore[assignment]
    history.bridge.start()
    history.bridge.post(lambda engine: engine.add(sequence(400)))
    await asyncio.wait_for(history.finished.wait(), 60)
    await history.bridge.stop(5)
    assert len(told) < 200
    assert sum(len(output.step_ms) for output in told) == num_tokens(history.items) == 400
