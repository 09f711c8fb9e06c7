import numpy as np
import pytest

from runtime.blocks.block_hash import block_hashes, sequence_hashes
from tests.engine import kv_oracle
from tests.engine.kv_oracle import make_sequence


def test_hashes_grow_block_by_block_and_equal_the_hashes_of_the_whole() -> None:
    tokens = list(range(100, 160))
    sequence = make_sequence("a", tokens[:20])
    for token in tokens[20:]:
        sequence.token_ids.append(token)
        sequence.hash_blocks(sequence.num_tokens // 4, 4)
    whole = block_hashes(np.array(tokens, dtype=np.uint32), 4)
    assert sequence.block_hashes == whole.tolist()
    assert sequence.sequence_hashes == sequence_hashes(whole).tolist()


def test_a_block_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    original = block_hashes

    def counting(tokens: np.ndarray, block_size: int, seed: int) -> np.ndarray:
        hashed.append(len(tokens) // block_size)
        return original(tokens, block_size, seed)

    monkeypatch.setattr("engine.sequences.sequence.block_hashes", counting)
    sequence = make_sequence("a", range(32))
    for num_blocks in (3, 3, 1, 8, 8):
        sequence.hash_blocks(num_blocks, 4)
    assert hashed == [3, 5]


def test_output_position_counts_replayed_output() -> None:
    sequence = make_sequence("a", range(10), num_prompt_tokens=7)
    assert sequence.num_output_tokens == 3
    assert sequence.output_token_ids == [7, 8, 9]


def test_higher_priority_comes_first_and_then_the_earlier_arrival() -> None:
    early, late, urgent = (make_sequence(name, [1]) for name in ("early", "late", "urgent"))
    early.arrival, late.arrival, urgent.arrival = 0, 1, 2
    urgent.priority = 1
    assert sorted([late, urgent, early], key=lambda s: s.order) == [urgent, early, late]


def test_only_a_prefill_only_sequence_can_be_pinned() -> None:
    with pytest.raises(AssertionError):
        make_sequence("a", [1], pinned=True)


def test_the_fake_model_ends_at_eos() -> None:
    answers = [kv_oracle.sequential_answer([i], 50) for i in range(20)]
    assert any(answer[-1] in kv_oracle.EOS and len(answer) < 50 for answer in answers)
