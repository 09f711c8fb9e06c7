"""Which outputs of a step may wait for the next one's: never a first or last token, and only while a step of decodes is
on its way."""

import pytest

from baton_proto.sampling import SamplingParams
from engine.sequences.output import StepOutput
from engine.sequences.sequence import Sequence
from tests.engine.kv_oracle import make_engine


def sequence(name: str, max_tokens: int, num_tokens: int = 6) -> Sequence:
    return Sequence(
        name, list(range(10, 10 + num_tokens)), num_tokens, SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    )


def tokens(output: StepOutput) -> dict[str, int]:
    return {one.sequence.request_id: len(one.token_ids) for one in output.outputs}


@pytest.mark.parametrize("depth", [0, 1])
def test_no_first_or_last_token_may_wait_and_others_only_while_decodes_run(depth: int) -> None:
    engine, _ = make_engine(depth=depth)
    engine.add(sequence("long", 24))
    seen = {"long": 0, "late": 0}
    wanted = {"long": 24, "late": 5}
    waited = 0
    for step in range(60):
        if step == 10:
            engine.add(sequence("late", 5, num_tokens=9))
        output = engine.step()
        news = tokens(output)
        for name, count in news.items():
            seen[name] += count
        hurries = any(seen[name] in (1, wanted[name]) for name in news)
        if output.may_wait:
            waited += 1
            assert not hurries
            assert engine._in_flight
            assert not engine._in_flight[-1].batch.prefill
        if not engine.has_work:
            break
    assert seen == wanted
    assert (waited > 10) == bool(depth)


def test_what_a_failed_step_says_does_not_wait() -> None:
    engine, runner = make_engine(depth=1)
    engine.add(sequence("r", 24))
    for _ in range(5):
        engine.step()

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    runner.submit = fail  # type: ignore[method-assign, assignment]
    outputs = [engine.step() for _ in range(2)]
    assert not any(output.may_wait for output in outputs)
    assert [one.finish for output in outputs for one in output.outputs][-1] == "error"
    assert sum(len(output.step_ms) for output in outputs) == 1, "the failed one has no time"
