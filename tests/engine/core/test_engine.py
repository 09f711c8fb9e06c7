"""The engine with a deterministic model whose KV is checked at every read."""

import itertools
from typing import Any

import pytest

from baton_proto.discovery import TimedStep
from baton_proto.sampling import TokenLogprobs
from engine.core.engine import FADES, LEAD_S, LEADS, LONG_S, MARGIN, Engine
from engine.sequences.batch import Batch, LayerDone, StepDone
from engine.sequences.output import SequenceOutput
from engine.sequences.sequence import Sequence, SequenceStatus
from runtime.config.step_fit import RECENT
from runtime.errors import InvalidRequestError
from tests.engine.kv_oracle import EOS, FakeRunner, make_engine, make_sequence, next_token, sequential_answer


def run(engine: Engine) -> list[SequenceOutput]:
    outputs = []
    for _ in range(1000):
        if not engine.has_work:
            return outputs
        outputs.extend(engine.step().outputs)
        assert engine.check_integrity() == []
    raise AssertionError("the engine does not come to an end")


def prompt_with(first_token_stops: bool, length: int = 10) -> list[int]:
    """A prompt after which the model says EOS at once, or does not for a while."""
    for i in range(10_000):
        prompt = [i % 50, i // 50, *range(length - 2)]
        answer = sequential_answer(prompt, 12)
        if (len(answer) == 1 and answer[0] in EOS) if first_token_stops else not EOS & set(answer):
            return prompt
    raise AssertionError


GOES_ON = prompt_with(first_token_stops=False)
STOPS = prompt_with(first_token_stops=True)


def test_eos_ends_a_sequence_unless_it_is_ignored() -> None:
    engine, _ = make_engine()
    engine.add(make_sequence("stops", STOPS, max_tokens=3))
    engine.add(make_sequence("ignores", STOPS, max_tokens=3, ignore_eos=True))
    by_id: dict[str, list[SequenceOutput]] = {"stops": [], "ignores": []}
    for output in run(engine):
        by_id[output.sequence.request_id].append(output)
    [only] = by_id["stops"]
    assert only.finish == "stop"
    assert only.token_ids == [only.stop_token] == [next_token(STOPS)]
    assert [output.finish for output in by_id["ignores"]] == [None, None, "length"]


def test_max_tokens_counts_replayed_output() -> None:
    answer = sequential_answer(GOES_ON, 6)
    engine, _ = make_engine()
    engine.add(make_sequence("a", GOES_ON + answer[:4], num_prompt_tokens=len(GOES_ON), max_tokens=6))
    assert [output.token_ids[0] for output in run(engine)] == answer[4:]


def test_a_long_prompt_is_computed_in_chunks_while_others_decode() -> None:
    engine, runner = make_engine(max_batch_tokens=8)
    engine.add(make_sequence("short", GOES_ON[:6], max_tokens=12, ignore_eos=True))
    engine.step()
    engine.add(make_sequence("long", range(30), max_tokens=1))
    run(engine)
    mixed = [batch for batch in runner.batches if batch.prefill and batch.decode]
    assert [batch.prefill[0].num_tokens for batch in mixed] == [7, 7, 7, 7, 2]
    assert all(batch.num_tokens <= 8 for batch in runner.batches)


def test_a_prefill_only_sequence_ends_after_one_token_even_at_eos() -> None:
    engine, _ = make_engine()
    engine.add(make_sequence("p", STOPS, prefill_only=True))
    [output] = run(engine)
    assert (output.finish, output.stop_token, output.token_ids) == ("prefill", None, [next_token(STOPS)])
    assert engine.load().blocks_used == 0


def test_a_pinned_sequence_keeps_its_blocks_until_it_is_unpinned() -> None:
    engine, runner = make_engine()
    sequence = make_sequence("p", GOES_ON, prefill_only=True, pinned=True)
    engine.add(sequence)
    run(engine)
    assert engine.load().blocks_used == 3
    runner.slab.check(sequence.block_table, GOES_ON, len(GOES_ON))
    engine.unpin(sequence)
    assert engine.load().blocks_used == 0
    engine.unpin(sequence)
    assert engine.check_integrity() == []


def test_an_aborted_pinned_sequence_keeps_its_blocks_too() -> None:
    engine, _ = make_engine(max_batch_tokens=4)
    sequence = make_sequence("p", GOES_ON, prefill_only=True, pinned=True)
    engine.add(sequence)
    engine.step()
    assert engine.abort("p") is sequence
    assert not engine.has_work or engine.step().outputs == []
    assert engine.load().blocks_used == 3
    engine.unpin(sequence)
    assert engine.load().blocks_used == 0


def test_layers_are_reported_with_their_batch() -> None:
    engine, runner = make_engine(max_batch_tokens=6)
    seen: list[tuple[Batch, int]] = []
    ran_before: list[int] = []

    def on_batch(batch: Batch) -> LayerDone:
        ran_before.append(len(runner.batches))
        return lambda layer: seen.append((batch, layer))

    engine.on_batch = on_batch
    engine.add(make_sequence("a", range(10), max_tokens=1))
    run(engine)
    assert seen == [(batch, layer) for batch in runner.batches for layer in (0, 1)]
    assert ran_before == list(range(len(runner.batches))), "each was announced before it ran"


def test_abort_frees_and_says_nothing() -> None:
    engine, _ = make_engine(max_running=1)
    engine.add(make_sequence("running", GOES_ON))
    engine.add(make_sequence("waiting", GOES_ON))
    engine.step()
    for name in ("running", "waiting"):
        aborted = engine.abort(name)
        assert aborted is not None
        assert aborted.status is SequenceStatus.FINISHED
    assert engine.abort("running") is None
    assert run(engine) == []
    assert engine.load().blocks_used == engine.load().waiting == engine.load().queued_prefill_tokens == 0


def remote(engine: Engine, runner: FakeRunner, name: str, prompt: list[int], **options: int) -> Sequence:
    sequence = make_sequence(name, prompt, **options)
    assert engine.reserve(sequence)
    runner.slab.write(sequence.block_table, prompt, sequence.num_computed_tokens, len(prompt))
    return sequence


def test_a_remote_sequence_is_admitted_and_decodes_on() -> None:
    engine, runner = make_engine()
    sequence = remote(engine, runner, "r", GOES_ON, max_tokens=5)
    assert not engine.has_work
    assert engine.abort("r") is None  # its owner has to wait for the transfer
    answer = sequential_answer(GOES_ON, 5)
    first = engine.admit(sequence, answer[0], TokenLogprobs(-1.0, []))
    assert (first.token_ids, first.logprobs, first.finish) == (answer[:1], [TokenLogprobs(-1.0, [])], None)
    outputs = run(engine)
    assert [output.token_ids[0] for output in outputs] == answer[1:]
    assert runner.computed == {"r": 4}
    assert engine.load().blocks_used == 0


def test_a_remote_sequence_shares_the_local_prefix() -> None:
    engine, runner = make_engine()
    engine.add(make_sequence("local", range(12), max_tokens=1))
    run(engine)
    sequence = remote(engine, runner, "r", [*range(12), 40, 41])
    assert sequence.num_computed_tokens == sequence.num_cached_tokens == 12


@pytest.mark.parametrize(("prompt", "max_tokens", "finish"), [(STOPS, 5, "stop"), (GOES_ON, 1, "length")])
def test_an_admitted_sequence_may_end_at_once(prompt: list[int], max_tokens: int, finish: str) -> None:
    engine, runner = make_engine()
    sequence = remote(engine, runner, "r", prompt, max_tokens=max_tokens)
    output = engine.admit(sequence, next_token(prompt), None)
    assert output.finish == finish
    assert engine.load().blocks_used == 0
    assert engine.has_work  # something is left to publish
    step = engine.step()
    assert step.outputs == []
    assert len(step.events) == 1  # the prompt's blocks are cached and told


def test_a_released_sequence_can_be_added_and_run_here() -> None:
    engine, runner = make_engine()
    sequence = make_sequence("r", GOES_ON, max_tokens=3)
    assert engine.reserve(sequence)
    engine.release(sequence)
    assert engine.load().blocks_used == 0
    engine.add(sequence)
    assert [output.token_ids[0] for output in run(engine)] == sequential_answer(GOES_ON, 3)
    assert runner.computed["r"] == len(GOES_ON) + 2


def test_a_failing_step_ends_its_batch_and_nothing_else() -> None:
    engine, runner = make_engine(max_running=2)
    for name in ("a", "b", "later"):
        engine.add(make_sequence(name, [*GOES_ON, ord(name[0]) % 50], max_tokens=2, ignore_eos=True))
    runner.failure = RuntimeError("out of memory")
    step = engine.step()
    assert [(output.sequence.request_id, output.finish) for output in step.outputs] == [("a", "error"), ("b", "error")]
    assert all("out of memory" in (output.error or "") for output in step.outputs)
    assert step.events == []
    assert engine.load().blocks_used == engine.load().blocks_cached == 0
    assert [output.finish for output in run(engine)] == [None, "length"]


def test_a_runner_that_loses_tokens_is_a_failure() -> None:
    engine, runner = make_engine()
    original = runner.submit
    runner.submit = lambda batch, done: StepDone(original(batch, done).tokens()[:-1])  # type: ignore[assignment]
    engine.add(make_sequence("a", GOES_ON))
    [output] = engine.step().outputs
    assert output.finish == "error"


def test_a_prompt_larger_than_the_pool_ends_with_an_error() -> None:
    engine, _ = make_engine(num_blocks=4)
    engine.add(make_sequence("large", range(17)))
    engine.add(make_sequence("small", GOES_ON, max_tokens=1))
    large, small = run(engine)
    assert large.finish == "error"
    assert "17 tokens" in (large.error or "")
    assert small.finish == "length"
    with pytest.raises(InvalidRequestError, match="17 tokens"):
        engine.reserve(make_sequence("large", range(17)))


def test_an_aborted_dead_end_is_not_reported() -> None:
    engine, _ = make_engine(num_blocks=4)
    engine.add(make_sequence("large", range(17)))
    assert engine.abort("large") is not None
    again = make_sequence("large", range(17))
    engine.add(again)
    [output] = run(engine)
    assert output.sequence is again


def test_a_request_id_runs_once_at_a_time() -> None:
    engine, _ = make_engine()
    engine.add(make_sequence("a", GOES_ON, max_tokens=1))
    with pytest.raises(InvalidRequestError, match="request_id"):
        engine.add(make_sequence("a", GOES_ON))
    run(engine)
    engine.add(make_sequence("a", GOES_ON, max_tokens=1))
    assert len(run(engine)) == 1


def test_load_counts_what_is_there() -> None:
    engine, _ = make_engine(max_batch_tokens=8, max_running=2)
    for name in ("a", "b", "c"):
        engine.add(make_sequence(name, [ord(name), *range(11)], max_tokens=4, ignore_eos=True))
    engine.step()
    load = engine.load()
    assert (load.running, load.waiting, load.blocks_total, load.steps) == (1, 2, 64, 1)
    assert load.queued_prefill_tokens == 4 + 12 + 12
    assert load.queued_prefill_pairs == (12**2 - 8**2 + 12**2 + 12**2) / 2
    assert load.blocks_used == 3
    assert load.step_ms > 0
    run(engine)
    assert engine.load().queued_prefill_tokens == engine.load().queued_prefill_pairs == 0


def test_clear_cache_forgets_prefixes() -> None:
    engine, runner = make_engine()
    engine.add(make_sequence("a", range(20), max_tokens=1))
    run(engine)
    engine.clear_cache()
    assert len(engine.step().events) == 1
    engine.add(make_sequence("b", range(20), max_tokens=1))
    run(engine)
    assert runner.computed["b"] == 20


def test_the_next_step_may_be_put_off_until_shortly_before_a_long_one_with_prompts_ends() -> None:
    now_s = 100.0
    engine, _ = make_engine(num_blocks=4096, max_batch_tokens=1000, depth=1)
    engine.clock = lambda: now_s
    steps = itertools.count()
    for _ in range(RECENT):
        engine.timed_steps.add(TimedStep(1000, 5e5, 0, 0, 100.0), 200.0 + 2 * next(steps))
    engine.add(make_sequence("long", range(5000)))
    engine.step()
    first = engine.scheduler.running[0].num_in_flight_tokens
    expected_s = engine.timed_steps.times.step_ms(first, first * first / 2, 0, 0) / 1e3
    assert expected_s > LONG_S
    assert engine.spare_s() == pytest.approx(expected_s * (1 - MARGIN) - LEAD_S)
    now_s += expected_s
    assert engine.spare_s() < 0.0
    engine.step()
    assert engine.spare_s() == pytest.approx(expected_s * (1 - MARGIN) - LEAD_S, rel=0.1), (
        "it began when that one landed"
    )
    while engine.scheduler.running[0].is_prefilling:
        engine.step()
    engine.step()
    assert engine.spare_s() == 0.0, "steps that only decode are short"


def test_the_longer_it_takes_to_submit_a_step_the_sooner_that_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without graphs, and beside a busy event loop, the device would wait for the host."""
    now_s, takes_s = 100.0, 0.03
    engine, runner = make_engine(num_blocks=4096, max_batch_tokens=1000, depth=1)
    engine.clock = lambda: now_s
    for step in range(RECENT):
        engine.timed_steps.add(TimedStep(1000, 5e5, 0, 0, 100.0), 200.0 + 2 * step)
    submit = runner.submit

    def slow(*given: Any) -> Any:
        nonlocal now_s
        now_s += takes_s
        return submit(*given)

    monkeypatch.setattr(runner, "submit", slow)
    engine.add(make_sequence("long", range(5000)))
    engine.step()
    tokens = engine.scheduler.running[0].num_in_flight_tokens
    whole_s = engine.timed_steps.times.step_ms(tokens, tokens * tokens / 2, 0, 0) / 1e3 * (1 - MARGIN)
    assert engine.spare_s() == pytest.approx(whole_s - LEADS * 0.03 - 0.03), "30 ms of it are over"
    takes_s = 0.0
    now_s += whole_s
    engine.step()
    assert engine._preparing_s == pytest.approx(FADES * 0.03), "the next one may take as long again"


@pytest.mark.parametrize("depth", [0, 1])
def test_no_step_is_put_off_while_nobody_knows_how_long_they_take_or_none_is_on_its_way(depth: int) -> None:
    engine, _ = make_engine(depth=depth)
    assert engine.spare_s() == 0.0
    engine.add(make_sequence("a", range(100, 200)))
    engine.step()
    assert engine.spare_s() == 0.0
