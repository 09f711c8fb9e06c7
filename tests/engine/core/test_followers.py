"""Prompts with the same new beginning: one computes it, the others wait for that, and nobody waits in vain."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from engine.core.engine import Engine
from engine.core.prefill_budget import LEAST_LED, MUCH_SHORTER
from engine.sequences.sequence import Sequence, SequenceStatus
from tests.engine.kv_oracle import FakeRunner, make_engine, make_sequence, sequential_answer

SHARED, OWN = 512, 24  # tokens
BLOCK_SIZE = 16


def siblings(count: int, *, first: int = 0, max_tokens: int = 3) -> list[Sequence]:
    shared = [token % 50 for token in range(SHARED)]
    return [
        make_sequence(f"s{name}", [*shared, *[50 + name % 10, name] * (OWN // 2)], max_tokens=max_tokens)
        for name in range(first, first + count)
    ]


def engine_of(max_batch_tokens: int, depth: int = 1, num_blocks: int = 1000) -> tuple[Engine, FakeRunner]:
    return make_engine(num_blocks, BLOCK_SIZE, max_batch_tokens=max_batch_tokens, max_running=64, depth=depth)


def run(engine: Engine) -> dict[str, list[int]]:
    """Steps to the end of all sequences. Returns their output."""
    outputs: dict[str, list[int]] = {}
    for _ in range(1000):
        if not engine.has_work:
            return outputs
        for output in engine.step().outputs:
            outputs.setdefault(output.sequence.request_id, []).extend(output.token_ids)
        assert engine.check_integrity() == []
    raise AssertionError("the engine does not come to an end")


def assert_exact(work: list[Sequence], outputs: dict[str, list[int]]) -> None:
    for sequence in work:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        assert outputs[sequence.request_id] == sequential_answer(prompt, sequence.sampling.max_tokens)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("max_batch_tokens", [128, 600, 2000, 8192])
def test_32_siblings_compute_their_new_prefix_once(max_batch_tokens: int, depth: int) -> None:
    engine, _ = engine_of(max_batch_tokens, depth)
    work = siblings(32)
    for sequence in work:
        engine.add(sequence)
    assert_exact(work, run(engine))
    assert engine.num_prompt_tokens == SHARED + 32 * OWN
    assert [sequence.num_cached_tokens for sequence in work] == [0] + 31 * [SHARED]


def test_siblings_that_come_while_the_first_is_on_its_way_follow_it_too() -> None:
    engine, _ = engine_of(64)
    work = siblings(8)
    for sequence in work:
        engine.add(sequence)
        assert engine.step().outputs == []
    assert_exact(work, run(engine))
    assert engine.num_prompt_tokens == SHARED + 8 * OWN


def test_who_follows_goes_on_as_soon_as_the_common_part_is_computed() -> None:
    engine, _ = engine_of(128, depth=0)
    first, second = siblings(2)
    longer = make_sequence("longer", first.token_ids + [1] * 400)
    engine.add(longer)
    engine.step()
    engine.add(second)
    while second.status is SequenceStatus.WAITING:
        engine.step()
    assert longer.is_prefilling
    assert second.num_cached_tokens == SHARED


@pytest.mark.parametrize("depth", [0, 1])
def test_when_the_first_is_aborted_the_next_one_goes_on_where_it_stopped(depth: int) -> None:
    engine, _ = engine_of(128, depth)
    work = siblings(6)
    for sequence in work:
        engine.add(sequence)
    for _ in range(3):
        engine.step()
    engine.abort("s0")
    assert_exact(work[1:], run(engine))
    lost = 128 * depth  # a step was on its way
    assert engine.num_prompt_tokens == SHARED + 5 * OWN + lost
    assert sum(sequence.num_cached_tokens < SHARED for sequence in work[1:]) == 1, "one of them became the first"


def test_when_a_step_of_the_first_fails_the_others_do_without_it() -> None:
    engine, runner = engine_of(128)
    work = siblings(4)
    for sequence in work:
        engine.add(sequence)
    engine.step()
    runner.failure = RuntimeError("boom")
    finished = {}
    outputs: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            outputs.setdefault(output.sequence.request_id, []).extend(output.token_ids)
            finished[output.sequence.request_id] = output.finish
        assert engine.check_integrity() == []
    assert finished.pop("s0") == "error"
    assert set(finished) == {"s1", "s2", "s3"}
    assert_exact(work[1:], outputs)


def test_when_the_first_is_preempted_nobody_waits_for_it_in_vain() -> None:
    engine, _ = engine_of(16, num_blocks=-(-(SHARED + OWN) // BLOCK_SIZE) + 3)
    talker = make_sequence("talker", [58] * BLOCK_SIZE, max_tokens=60, priority=1, ignore_eos=True)
    engine.add(talker)
    engine.step()
    work = siblings(3)
    for sequence in work:
        engine.add(sequence)
    outputs = run(engine)
    assert work[0].num_preemptions > 0
    assert_exact(work, outputs)


def test_others_do_not_wait_behind_those_that_follow() -> None:
    engine, _ = engine_of(600, depth=0)
    engine.clock = lambda: 0.0  # all come at one moment, and the shortest goes first
    for sequence in siblings(20):
        engine.add(sequence)
    stranger = make_sequence("stranger", [59] * 40)
    engine.add(stranger)
    engine.step()
    assert stranger.status is SequenceStatus.RUNNING
    assert len(engine.scheduler.waiting) == 19


def test_a_more_urgent_one_does_not_wait_for_a_less_urgent_one() -> None:
    engine, _ = engine_of(128, depth=0)
    (first,) = siblings(1)
    engine.add(first)
    engine.step()
    urgent = make_sequence("urgent", first.token_ids[:-1], priority=1)
    engine.add(urgent)
    engine.step()
    assert urgent.status is SequenceStatus.RUNNING


def test_a_much_shorter_one_does_not_wait_for_a_book_that_begins_alike() -> None:
    engine, _ = engine_of(600, depth=0)
    (first,) = siblings(1)
    engine.add(make_sequence("book", first.token_ids + [1] * 2000))
    engine.step()
    engine.add(first)
    engine.step()
    assert first.status is SequenceStatus.RUNNING


def test_who_needs_log_probabilities_of_its_prompt_follows_nobody() -> None:
    engine, _ = engine_of(1200, depth=0)
    first, second = siblings(2)
    second.num_unscored, second.scores = second.num_prompt_tokens - 1, []
    for sequence in (first, second):
        engine.add(sequence)
    engine.scheduler.schedule()
    assert second.status is SequenceStatus.RUNNING


# --- against the tokens themselves ------------------------------------------------------------------------------------


def check(engine: Engine, before: dict[Sequence, int], started: list[Sequence]) -> None:
    """`before`: what each had left before the step was scheduled. By token lists, not by hashes."""
    scheduler = engine.scheduler
    least = min(LEAST_LED, scheduler.max_batch_tokens // 4)
    for sequence in started:
        for leader, left in before.items():
            if leader.priority >= sequence.priority and leader.status is SequenceStatus.RUNNING:
                led = common_tokens(leader, sequence, engine.block_manager.block_size) - sequence.num_computed_tokens
                own = sequence.num_prefill_tokens - sequence.num_computed_tokens
                twice = led if leader.num_computed_tokens < led + sequence.num_computed_tokens else 0
                assert twice <= least or own * MUCH_SHORTER <= left, f"{sequence} computes what {leader} does"
    for sequence in scheduler.waiting:
        if (leader := sequence.leader) is not None and leader.status is SequenceStatus.RUNNING:
            assert leader.priority >= sequence.priority
            assert common_tokens(leader, sequence, engine.block_manager.block_size) >= sequence.num_led_tokens


def common_tokens(one: Sequence, other: Sequence, block_size: int) -> int:
    """In whole blocks of both prompts, and not the last token of the second."""
    limit = min(one.num_prefill_tokens, other.num_tokens - 1)
    equal = next((i for i in range(limit) if one.token_ids[i] != other.token_ids[i]), limit)
    return equal // block_size * block_size


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    work=st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=4),  # which way at each fork
            st.integers(1, 40),  # tokens behind the last fork
            st.integers(0, 12),  # step at which it comes
            st.sampled_from([0, 0, 0, 1]),  # priority
            st.sampled_from([None, None, None, 3, 8]),  # steps until it is aborted
        ),
        min_size=2,
        max_size=12,
    ),
    max_batch_tokens=st.sampled_from([8, 20, 64, 200]),
    spare_blocks=st.integers(0, 60),
    depth=st.sampled_from([0, 1]),
)
def test_nobody_computes_what_an_earlier_one_is_computing_and_all_come_to_the_end(
    work: list[tuple[list[int], int, int, int, int | None]], max_batch_tokens: int, spare_blocks: int, depth: int
) -> None:
    prompts = [
        [token for turn in turns for token in [turn] * 30] + [2 + i % 40] * own
        for i, (turns, own, _, _, _) in enumerate(work)
    ]
    num_blocks = max(-(-(len(prompt) + 6) // 4) for prompt in prompts) + spare_blocks
    engine, _ = make_engine(num_blocks, 4, max_batch_tokens=max_batch_tokens, max_running=8, depth=depth)
    sequences = {
        i: make_sequence(f"r{i}", prompt, max_tokens=5, priority=work[i][3]) for i, prompt in enumerate(prompts)
    }
    outputs: dict[str, list[int]] = {sequence.request_id: [] for sequence in sequences.values()}
    schedule = engine.scheduler.schedule

    def checked(now_s: float):  # type: ignore[no-untyped-def]
        running = engine.scheduler.running
        before = {s: s.num_prefill_tokens - s.num_scheduled_tokens for s in running if s.is_prefilling}
        batch = schedule(now_s)
        check(engine, before, [s for s in running if s.is_prefilling and s not in before])
        return batch

    engine.scheduler.schedule = checked  # type: ignore[method-assign]
    ended = set()
    for now in range(2000):
        for i, (_, _, arrives, _, stays) in enumerate(work):
            if arrives == now:
                engine.add(sequences[i])
            if stays is not None and arrives + stays == now and engine.abort(f"r{i}"):
                ended.add(f"r{i}")
        for output in engine.step().outputs:
            outputs[output.sequence.request_id] += output.token_ids
            assert output.error is None
            if output.finish is not None:
                ended.add(output.sequence.request_id)
        assert engine.check_integrity() == []
        if len(ended) == len(work):
            break
    assert len(ended) == len(work), "somebody waits in vain"
    for i, prompt in enumerate(prompts):
        answer = sequential_answer(prompt, 5)
        assert answer[: len(outputs[f"r{i}"])] == outputs[f"r{i}"]
        assert work[i][4] is not None or outputs[f"r{i}"] == answer
