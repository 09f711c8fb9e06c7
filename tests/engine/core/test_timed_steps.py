"""The samples of timed steps that a worker hands to the planner, taken from an engine that runs."""

import pytest

from baton_proto.discovery import TimedStep
from engine.core.timed_steps import KEPT
from tests.engine.kv_oracle import make_sequence
from tests.engine.runners.test_mock_runner import FORMULA, make_engine


def test_a_step_is_kept_with_what_it_computed_and_how_long_it_took() -> None:
    engine, _ = make_engine()
    engine.add(make_sequence("a", range(100, 110), max_tokens=3))
    while engine.has_work:
        engine.step()
    prompt, first, second = engine.timed_steps.take()
    assert prompt == TimedStep(10, 10 * 10 / 2, 0, 0, pytest.approx(5.0 + 0.5))
    for step, context in ((first, 11), (second, 12)):
        expected_ms = FORMULA.decode_floor_ms + FORMULA.decode_sequence_ms + FORMULA.decode_token_ms * context
        assert step == TimedStep(0, 0, 1, context, pytest.approx(expected_ms))


def test_only_the_first_steps_since_the_last_take_are_kept() -> None:
    engine, _ = make_engine()
    engine.add(make_sequence("a", range(100, 110), max_tokens=40, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert len(engine.timed_steps.take()) == KEPT
    assert engine.timed_steps.take() == []
