"""Who is guessed ahead, how far, and when that ends by itself."""

from typing import Any

import pytest

from engine.drafts.speculation import FORGIVEN, FREE_ROWS, TRIAL
from engine.sequences.sequence import Sequence
from tests.engine.drafts.guesses import Guesses
from tests.engine.kv_oracle import FakeRunner, make_engine, make_sequence, next_token

LONG = 320  # tokens of an answer
BLOCK_SIZE = 16


def answer_to(prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(LONG):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def run(count: int, right: float, *, depth: int = 0, **sampling: Any) -> tuple[FakeRunner, list[Sequence], int]:
    """Returns the number of tokens that were guessed, too."""
    prompts = [[index, 50, 51] for index in range(count)]
    answers = [answer_to(prompt) for prompt in prompts]

    def answer(sequence: Sequence, most: int) -> list[int]:
        known = sequence.next_position
        return answers[int(sequence.request_id)][known : known + most]

    engine, runner = make_engine(
        4096, BLOCK_SIZE, max_batch_tokens=512, max_running=64, depth=depth, drafter=Guesses(answer, right)
    )
    work = [
        make_sequence(str(index), prompt, max_tokens=LONG, ignore_eos=True, **sampling)
        for index, prompt in enumerate(prompts)
    ]
    for sequence in work:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
    assert [sequence.output_token_ids for sequence in work] == answers
    return runner, work, engine.speculation.num_drafted


def test_a_sequence_that_is_guessed_wrong_is_soon_left_alone() -> None:
    runner, (sequence,), num_drafted = run(1, right=0.0)
    assert sequence.num_accepted_tokens == 0
    assert num_drafted > 0
    assert sum(bool(batch.drafted) for batch in runner.batches) <= TRIAL + LONG * FORGIVEN
    assert len(runner.batches) == LONG


def test_a_sequence_that_is_guessed_right_takes_few_steps() -> None:
    runner, (sequence,), num_drafted = run(1, right=1.0)
    assert len(runner.batches) + sequence.num_accepted_tokens == LONG
    assert sequence.num_accepted_tokens == num_drafted > LONG // 2


@pytest.mark.parametrize("right", [0.5, 0.8])
def test_drafts_cost_few_steps_more_than_their_right_guesses_save(right: float) -> None:
    runner, (sequence,), _ = run(1, right)
    cost = sum(bool(batch.drafted) for batch in runner.batches) - sequence.num_accepted_tokens
    assert cost <= TRIAL + LONG * FORGIVEN


def test_a_step_with_drafts_has_few_rows_and_without_room_there_are_none() -> None:
    runner, _, num_drafted = run(6, right=1.0)
    rows = [sum(item.num_samples for item in batch.items) for batch in runner.batches if batch.drafted]
    assert FREE_ROWS - 2 <= max(rows) <= FREE_ROWS
    assert num_drafted
    crowded, _, _ = run(FREE_ROWS + 2, right=1.0)
    assert not any(batch.drafted for batch in crowded.batches if len(batch.decode + batch.drafted) >= FREE_ROWS)


def test_a_runner_that_samples_all_rows_at_once_gets_drafts_of_plain_sequences_alone() -> None:
    assert run(1, right=1.0, depth=1)[2] > LONG // 2
    assert run(1, right=1.0, depth=1, frequency_penalty=0.1)[2] == 0
    assert run(1, right=1.0, depth=0, frequency_penalty=0.1)[2] > LONG // 2
