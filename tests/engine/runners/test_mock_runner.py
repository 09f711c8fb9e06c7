import pytest

from engine.blocks.block_manager import BlockManager
from engine.core.engine import Engine
from engine.runners.mock_runner import MockRunner
from engine.sequences.batch import Batch, ScheduledSequence
from engine.sequences.sequence import Sequence
from runtime.config.step_times import StepTimes
from tests.engine.kv_oracle import make_sequence

EOS = 2
ANSWER_TOKENS = 5
VOCABULARY = list(range(10, 40))
FORMULA = StepTimes(
    prefill_floor_ms=3.0,
    prefill_token_ms=0.5,
    prefill_pair_ms=0.01,
    decode_floor_ms=2.0,
    decode_sequence_ms=0.25,
    decode_token_ms=0.001,
)


def chunk(start: int, num_tokens: int) -> ScheduledSequence:
    return ScheduledSequence(make_sequence("a", range(100)), start, num_tokens, sample=True)


def make_engine() -> tuple[Engine, MockRunner]:
    runner = MockRunner(FORMULA, ANSWER_TOKENS, VOCABULARY, EOS)
    manager = BlockManager(64, 4)
    engine = Engine(
        runner, manager, max_batch_tokens=64, max_running=8, eos_token_ids=frozenset({EOS}), clock=runner.clock
    )
    return engine, runner


def answer(sequence: Sequence) -> list[int]:
    engine, _ = make_engine()
    engine.add(sequence)
    while engine.has_work:
        engine.step()
    assert engine.check_integrity() == []
    return sequence.output_token_ids


def step_ms(batch: Batch, times: StepTimes = FORMULA) -> float:
    runner = MockRunner(times, ANSWER_TOKENS, VOCABULARY, EOS)
    runner.submit(batch)
    return runner.clock() * 1e3


def test_a_prompt_takes_time_for_its_tokens_and_for_the_pairs_of_them() -> None:
    # n = 10 behind p = 20: 0.5 * 10 + 0.01 * 10 * (20 + 5)
    assert step_ms(Batch([chunk(20, 10)], [])) == pytest.approx(5.0 + 2.5)


def test_several_chunks_share_the_floor_and_add_up_above_it() -> None:
    assert step_ms(Batch([chunk(0, 1), chunk(0, 1)], [])) == 3.0
    assert step_ms(Batch([chunk(0, 10), chunk(20, 10)], [])) == pytest.approx(10.0 + 0.5 + 2.5)


def test_decoding_takes_time_for_each_sequence_and_for_its_context() -> None:
    # B = 2, K = 50 + 80
    assert step_ms(Batch([], [chunk(49, 1), chunk(79, 1)])) == pytest.approx(2.0 + 0.5 + 0.13)


def test_a_step_that_does_both_reads_the_weights_once_and_a_speed_up_divides_all() -> None:
    batch = Batch([chunk(0, 1)], [chunk(99, 1)])
    assert step_ms(batch) == pytest.approx(3.0 + 0.35)
    assert step_ms(batch, FORMULA.faster(10)) == pytest.approx(0.335)


def test_the_engine_reports_the_steps_of_the_runners_own_clock() -> None:
    engine, runner = make_engine()
    engine.add(make_sequence("a", range(100, 120)))
    engine.step()
    # 20 tokens: 10 ms and 0.01 * 20 * 10
    assert runner.now_s == pytest.approx(0.012)
    assert engine.load().step_ms == pytest.approx(12.0)


def test_an_answer_ends_by_itself_unless_the_request_ignores_that() -> None:
    assert answer(make_sequence("a", [1, 2, 3], max_tokens=50))[4:] == [EOS]
    patient = answer(make_sequence("a", [1, 2, 3], max_tokens=50, min_tokens=9))
    assert len(patient) == 10
    assert patient[-1] == EOS
    endless = answer(make_sequence("a", [1, 2, 3], max_tokens=50, ignore_eos=True))
    assert len(endless) == 50
    assert EOS not in endless
    assert set(endless) <= set(VOCABULARY)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_replay_goes_on_with_the_same_tokens(temperature: float) -> None:
    def sequence(tokens: list[int]) -> Sequence:
        made = make_sequence("a", tokens, num_prompt_tokens=3, max_tokens=20, seed=5, ignore_eos=True)
        made.sampling = made.sampling.__replace__(temperature=temperature)
        return made

    whole = answer(sequence([1, 2, 3]))
    assert answer(sequence([1, 2, 3, *whole[:7]])) == whole


def test_another_seed_gives_other_tokens() -> None:
    def sampled(seed: int) -> list[int]:
        sequence = make_sequence("a", [1, 2, 3], max_tokens=20, seed=seed, ignore_eos=True)
        sequence.sampling = sequence.sampling.__replace__(temperature=1.0)
        return answer(sequence)

    assert sampled(1) != sampled(2)


def test_logprobs_come_for_each_token_when_asked_for() -> None:
    engine, _ = make_engine()
    engine.add(make_sequence("a", [1, 2, 3], logprobs=1))
    (output,) = engine.step().outputs
    (logprobs,) = output.logprobs
    assert logprobs.top[0][0] == output.token_ids[0]
