"""Outputs of quick steps that leave together: nothing is lost, reordered or late."""

import random

import pytest

from baton_proto.kv_events import Cleared, KvEvent
from baton_proto.sampling import SamplingParams
from engine.sequences.output import SequenceOutput, StepOutput
from engine.sequences.sequence import Sequence
from tests.clock import Clock
from worker.gathered_steps import GatheredSteps, gather_s

GATHER_S = 0.010


def sequences(count: int) -> list[Sequence]:
    return [Sequence(f"r{i}", [1, 2, 3], 3, SamplingParams(max_tokens=1000)) for i in range(count)]


def token(sequence: Sequence, token_id: int, finish: str | None = None) -> SequenceOutput:
    return SequenceOutput(sequence, [token_id], [], finish)


def test_tokens_of_quick_steps_leave_as_one_output_per_sequence() -> None:
    clock = Clock(100.0)
    steps, (one, other) = GatheredSteps(GATHER_S, clock), sequences(2)
    left = []
    for step in range(8):
        clock.now_s += 0.002
        output = steps.add(StepOutput([token(one, step), token(other, -step)], [], 2, may_wait=True))
        left += [] if output is None else [output]
    first, second, *_ = left  # the first step waits for nothing, the third ends when 4 ms do
    assert [output.token_ids for output in first.outputs] == [[0], [0]]
    assert [output.token_ids for output in second.outputs[:2]] == [[1], [-1]]
    assert second.num_tokens == 4


def test_tokens_of_more_requests_are_gathered_longer() -> None:
    assert gather_s(0.010, 1) == gather_s(0.010, 24) == 0.004, "8B models' steps of one reader take 5 ms"
    assert gather_s(0.010, 60) == gather_s(0.010, 160) == 0.010
    assert gather_s(0.010, 500) == pytest.approx(0.030)
    assert gather_s(0.0, 500) == 0


@pytest.mark.parametrize("step_s", [0.006, 0.03])
def test_a_step_that_takes_its_time_leaves_at_once(step_s: float) -> None:
    clock = Clock(100.0)
    steps, (one,) = GatheredSteps(0.008, clock), sequences(1)
    for step in range(4):
        clock.now_s += step_s
        assert steps.add(StepOutput([token(one, step)], [], 1, may_wait=True)) is not None


def test_what_comes_later_overtakes_nothing_that_waits() -> None:
    clock = Clock(100.0)
    steps, (one,) = GatheredSteps(GATHER_S, clock), sequences(1)
    steps.add(StepOutput([token(one, 0)], [], 1, may_wait=True))
    clock.now_s += 0.001
    assert steps.add(StepOutput([token(one, 1)], [], 1, may_wait=True)) is None
    waiting = steps.take()
    assert waiting is not None
    assert [output.token_ids for output in waiting.outputs] == [[1]]
    assert steps.take() is None


@pytest.mark.parametrize("seed", range(20))
def test_every_token_and_event_arrives_in_order_and_in_time(seed: int) -> None:
    source, clock = random.Random(seed), Clock(100.0)
    steps, running = GatheredSteps(GATHER_S, clock), sequences(5)
    sent: dict[Sequence, list[int]] = {sequence: [] for sequence in running}
    came: dict[Sequence, list[int]] = {sequence: [] for sequence in running}
    events_sent: list[KvEvent] = []
    events_came: list[KvEvent] = []
    since_s: float | None = None
    for number in range(400):
        step_s = source.choice([0.0005, 0.002, 0.004, 0.02])
        clock.now_s += step_s
        outputs = []
        for sequence in source.sample(running, source.randint(0, len(running))):
            finish = "length" if source.random() < 0.02 else None
            outputs.append(token(sequence, number, finish))
            sent[sequence].append(number)
            if finish:
                running[running.index(sequence)] = fresh = sequences(1)[0]
                sent[fresh], came[fresh] = [], []
        events: list[KvEvent] = [Cleared()] if source.random() < 0.1 else []
        events_sent += events
        may_wait = all(output.finish is None for output in outputs) and source.random() < 0.9
        left = steps.add(StepOutput(outputs, events, len(outputs), may_wait=may_wait))
        if left is None:
            assert may_wait
            since_s = clock.now_s if since_s is None else since_s
            assert clock.now_s - since_s < GATHER_S
            continue
        since_s = None
        events_came += left.events
        for output in left.outputs:
            came[output.sequence] += output.token_ids
        assert sum(len(output.token_ids) for output in left.outputs) == left.num_tokens
    last = steps.take()
    for output in last.outputs if last else []:
        came[output.sequence] += output.token_ids
    assert came == sent
    assert events_came + (last.events if last else []) == events_sent
