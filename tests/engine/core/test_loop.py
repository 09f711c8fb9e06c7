"""The engine's thread: sleeps, wakes, survives what others get wrong."""

import queue
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from engine.core.engine import Engine
from engine.core.loop import EngineLoop
from engine.sequences.output import StepOutput
from runtime.errors import UnavailableError
from tests.engine.kv_oracle import make_engine, make_sequence, sequential_answer

TIMEOUT_S = 30.0


class Harness:
    def __init__(self, **options: int) -> None:
        self.engine, self.runner = make_engine(**options)
        self.steps: queue.Queue[StepOutput] = queue.Queue()
        self.loop = EngineLoop(self.engine, self.steps.put)

    def run_until(self, done: Callable[[StepOutput], bool]) -> list[StepOutput]:
        steps = []
        while True:
            steps.append(self.steps.get(timeout=TIMEOUT_S))
            if done(steps[-1]):
                return steps


@pytest.fixture
def harness() -> Iterator[Harness]:
    harness = Harness()
    harness.loop.start()
    yield harness
    harness.loop.stop(TIMEOUT_S)


def finished(step: StepOutput) -> bool:
    return any(output.finish for output in step.outputs)


def count_steps(engine: Engine) -> list[float]:
    """Times of all steps from now on."""
    times: list[float] = []
    original = engine.step

    def step() -> StepOutput:
        times.append(time.monotonic())
        return original()

    engine.step = step  # type: ignore[method-assign]
    return times


def test_calls_run_on_the_engines_thread(harness: Harness) -> None:
    assert harness.loop.call(lambda engine: threading.current_thread().name).result(TIMEOUT_S) == "engine"


def test_calls_run_between_the_steps_of_a_busy_engine() -> None:
    harness = Harness(num_blocks=4096)
    harness.loop.start()
    harness.loop.call(lambda engine: engine.add(make_sequence("a", [1], max_tokens=16_000, ignore_eos=True)))
    harness.steps.get(timeout=TIMEOUT_S)
    aborted = harness.loop.call(lambda engine: engine.abort("a")).result(TIMEOUT_S)
    assert aborted is not None
    assert harness.loop.call(lambda engine: engine.check_integrity()).result(TIMEOUT_S) == []
    assert not harness.loop.call(lambda engine: engine.has_work).result(TIMEOUT_S)
    harness.loop.stop(TIMEOUT_S)


def test_an_idle_engine_sleeps(harness: Harness) -> None:
    harness.loop.call(lambda engine: None).result(TIMEOUT_S)
    times = count_steps(harness.engine)
    harness.loop.call(lambda engine: None).result(TIMEOUT_S)
    harness.loop.call(lambda engine: None).result(TIMEOUT_S)
    time.sleep(0.05)
    assert len(times) <= 2


def test_an_engine_whose_sequences_wait_for_memory_sleeps_until_a_call(harness: Harness) -> None:
    held = make_sequence("held", range(240))
    assert harness.loop.call(lambda engine: engine.reserve(held)).result(TIMEOUT_S)
    harness.loop.call(lambda engine: engine.add(make_sequence("a", range(40), max_tokens=1))).result(TIMEOUT_S)
    times = count_steps(harness.engine)
    time.sleep(0.05)
    assert len(times) <= 1
    assert harness.steps.empty()
    harness.loop.call(lambda engine: engine.release(held))
    harness.run_until(finished)


def test_events_without_a_step_are_reported(harness: Harness) -> None:
    harness.loop.call(lambda engine: engine.add(make_sequence("a", range(9), max_tokens=1)))
    harness.run_until(finished)
    harness.loop.call(lambda engine: engine.clear_cache())
    step = harness.steps.get(timeout=TIMEOUT_S)
    assert step.outputs == []
    assert len(step.events) == 1


def test_a_call_wakes_the_engine_at_once(harness: Harness) -> None:
    delays_s = []
    for _ in range(50):
        started_s = time.perf_counter()
        harness.loop.call(lambda engine: None).result(TIMEOUT_S)
        delays_s.append(time.perf_counter() - started_s)
    assert min(delays_s) < 0.005  # a polling loop would need its interval each time


def test_an_exception_in_on_step_does_not_end_the_loop() -> None:
    engine, _ = make_engine()
    seen: queue.Queue[StepOutput] = queue.Queue()

    def on_step(step: StepOutput) -> None:
        seen.put(step)
        raise ValueError("a fault of the receiver")

    loop = EngineLoop(engine, on_step)
    loop.start()
    loop.call(lambda engine: engine.add(make_sequence("a", [1, 2], max_tokens=2, ignore_eos=True)))
    assert [seen.get(timeout=TIMEOUT_S).outputs[0].finish for _ in range(2)] == [None, "length"]
    loop.stop(TIMEOUT_S)


def test_on_step_may_call_the_loop() -> None:
    engine, _ = make_engine()
    done = threading.Event()

    def on_step(step: StepOutput) -> None:
        if finished(step):
            loop.call(lambda engine: done.set())

    loop = EngineLoop(engine, on_step)
    loop.start()
    loop.call(lambda engine: engine.add(make_sequence("a", [1, 2], max_tokens=1)))
    assert done.wait(TIMEOUT_S)
    loop.stop(TIMEOUT_S)


def test_stop_ends_the_thread_and_refuses_calls() -> None:
    harness = Harness()
    harness.loop.start()
    harness.loop.call(lambda engine: engine.add(make_sequence("a", [1], max_tokens=200, ignore_eos=True)))
    harness.loop.stop(TIMEOUT_S)
    harness.loop.stop(TIMEOUT_S)
    assert harness.loop.ended.result(TIMEOUT_S) is None
    with pytest.raises(UnavailableError):
        harness.loop.call(lambda engine: None).result(TIMEOUT_S)
    assert not any(thread.name == "engine" for thread in threading.enumerate())


def test_a_loop_that_was_never_started_can_be_stopped() -> None:
    harness = Harness()
    early = harness.loop.call(lambda engine: None)
    harness.loop.stop(TIMEOUT_S)
    with pytest.raises(UnavailableError):
        early.result(TIMEOUT_S)


def test_a_fault_of_the_engine_itself_ends_the_loop_loudly() -> None:
    harness = Harness()
    fault = AssertionError("accounts disagree")

    def step() -> StepOutput:
        raise fault

    harness.engine.step = step  # type: ignore[method-assign]
    harness.loop.start()
    harness.loop.call(lambda engine: None).result(TIMEOUT_S)
    assert harness.loop.ended.exception(TIMEOUT_S) is fault
    with pytest.raises(UnavailableError):
        harness.loop.call(lambda engine: None).result(TIMEOUT_S)


def test_a_cancelled_call_does_not_run() -> None:
    harness = Harness()
    ran: list[int] = []
    cancelled = harness.loop.call(lambda engine: ran.append(1))
    kept = harness.loop.call(lambda engine: ran.append(2))
    assert cancelled.cancel()
    harness.loop.start()
    kept.result(TIMEOUT_S)
    harness.loop.stop(TIMEOUT_S)
    assert ran == [2]


def test_many_threads_submit_at_once(harness: Harness) -> None:
    prompts = {f"{i}": [i % 9, i // 9, 3] for i in range(40)}
    threads = [
        threading.Thread(
            target=lambda name=name, prompt=prompt: harness.loop.call(
                lambda engine: engine.add(make_sequence(name, prompt, max_tokens=5))
            )
        )
        for name, prompt in prompts.items()
    ]
    for thread in threads:
        thread.start()
    answers: dict[str, list[int]] = {name: [] for name in prompts}
    open_names = set(prompts)
    while open_names:
        for output in harness.steps.get(timeout=TIMEOUT_S).outputs:
            answers[output.sequence.request_id].extend(output.token_ids)
            if output.finish:
                open_names.remove(output.sequence.request_id)
    assert answers == {name: sequential_answer(prompt, 5) for name, prompt in prompts.items()}
    for thread in threads:
        thread.join()


def test_a_sequence_that_comes_while_the_next_step_is_put_off_is_in_that_step() -> None:
    harness = Harness(depth=1, max_batch_tokens=8)
    harness.engine.clock = lambda: 0.0  # else the first one may have waited long enough to go before the second
    has_come = threading.Event()
    putting_off = threading.Event()

    def spare_s() -> float:
        if has_come.is_set() or len(harness.runner.batches) != 1:
            return 0.0
        putting_off.set()
        return TIMEOUT_S

    harness.engine.spare_s = spare_s  # type: ignore[method-assign]
    harness.loop.start()
    try:
        harness.loop.call(lambda engine: engine.add(make_sequence("first", range(100, 140))))
        assert putting_off.wait(TIMEOUT_S)

        def second(engine: Engine) -> None:
            engine.add(make_sequence("second", range(200, 204)))
            has_come.set()

        harness.loop.call(second)
        harness.run_until(finished)
    finally:
        harness.loop.stop(TIMEOUT_S)
    assert [item.sequence.request_id for item in harness.runner.batches[1].prefill] == ["second", "first"]


def test_the_end_of_the_loop_waits_for_no_step_that_is_put_off() -> None:
    harness = Harness(depth=1)
    putting_off = threading.Event()

    def spare_s() -> float:
        putting_off.set()
        return 10 * TIMEOUT_S

    harness.engine.spare_s = spare_s  # type: ignore[method-assign]
    harness.loop.start()
    harness.loop.call(lambda engine: engine.add(make_sequence("a", range(100, 140))))
    assert putting_off.wait(TIMEOUT_S)
    harness.loop.stop(TIMEOUT_S)
    harness.loop.ended.result(0)
