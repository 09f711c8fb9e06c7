"""Prefixes whose hashes collide never read each other's KV: by hand, with weak hashes, and through a whole engine."""

import random
from unittest.mock import patch

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import rule
from numpy.typing import NDArray

from engine.blocks.block_manager import BlockManager
from engine.sequences.sequence import Sequence
from runtime.blocks.block_hash import sequence_hashes
from tests.engine.blocks.block_machine import BlockMachine, allocated, compute, few_and_many, prompts
from tests.engine.kv_oracle import EventReplica, make_engine, make_sequence, sequential_answer, snapshot

HASHES = "engine.sequences.sequence.sequence_hashes"


def weak(hashes: NDArray[np.uint64], parent: int | None = None) -> NDArray[np.uint64]:
    """A chain of hashes that collides about once in five."""
    return sequence_hashes(hashes, parent) % np.uint64(5)


def counted(hashes: NDArray[np.uint64], parent: int | None = None) -> NDArray[np.uint64]:
    """All prefixes of one length have one hash."""
    first = 0 if parent is None else parent + 1
    return np.arange(first, first + len(hashes), dtype=np.uint64)


@pytest.fixture
def colliding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HASHES, counted)


def cached(manager: BlockManager, tokens: list[int], name: str = "cached") -> Sequence:
    """A sequence that holds its blocks; all but the last token's are computed and committed."""
    sequence = allocated(manager, name, [*tokens, 59])
    compute(manager, sequence, len(tokens))
    return sequence


@pytest.mark.usefixtures("colliding")
@pytest.mark.parametrize("equal_tokens", [0, 4, 5, 7])
def test_a_hit_ends_where_another_prefix_has_the_same_hash(equal_tokens: int) -> None:
    manager = BlockManager(16, 4)
    theirs = cached(manager, list(range(12)))
    ours = allocated(manager, "ours", [*range(equal_tokens), *range(40, 52)])
    assert ours.num_computed_tokens == equal_tokens // 4 * 4
    assert set(ours.block_table) & set(theirs.block_table) == set(theirs.block_table[: equal_tokens // 4])
    assert manager.cache.table.num_collisions == 1
    assert manager.check_integrity() == []


@pytest.mark.usefixtures("colliding")
def test_the_same_tokens_after_another_prefix_are_no_hit() -> None:
    manager = BlockManager(16, 4)
    theirs = cached(manager, [*range(4), *range(20, 28)])
    other = make_sequence("other", [*range(10, 14), *range(20, 29)])  # equal from its second block on
    assert manager.allocate(other)
    assert other.num_computed_tokens == 0
    assert not set(other.block_table) & set(theirs.block_table)


@pytest.mark.usefixtures("colliding")
@pytest.mark.parametrize("equal_tokens", [0, 4, 7, 8])
def test_blocks_with_one_hash_and_other_tokens_are_not_merged(equal_tokens: int) -> None:
    manager = BlockManager(16, 4)
    theirs, ours = make_sequence("theirs", range(12)), make_sequence("ours", [*range(equal_tokens), *range(40, 52)])
    assert manager.allocate(theirs)
    assert manager.allocate(ours)
    own = list(ours.block_table)
    compute(manager, theirs)
    compute(manager, ours)
    merged = equal_tokens // 4
    assert ours.block_table == theirs.block_table[:merged] + own[merged:]
    assert ours.num_committed_blocks == merged
    assert manager.check_integrity() == []
    manager.free(theirs)
    manager.free(ours)
    assert manager.num_used == 0
    assert manager.check_integrity() == []


@pytest.mark.usefixtures("colliding")
def test_a_prefix_that_met_another_is_cached_once_that_one_is_gone() -> None:
    manager, replica = BlockManager(16, 4), EventReplica()
    theirs = cached(manager, list(range(8)), "theirs")
    ours = cached(manager, list(range(40, 48)), "ours")
    assert ours.num_committed_blocks == 0
    manager.free(theirs)
    manager.clear()
    manager.commit(ours)
    assert ours.num_committed_blocks == 2
    replica.apply(manager.cache.take_events())
    assert replica.parents == snapshot(manager) == {0: None, 1: 0}


def test_sequences_of_different_hash_seeds_have_different_hashes() -> None:
    plain, salted, same = (make_sequence(name, range(16)) for name in ("plain", "salted", "same"))
    salted.hash_seed = same.hash_seed = 42
    for sequence in (plain, salted, same):
        sequence.hash_blocks(4, 4)
    assert not set(plain.block_hashes) & set(salted.block_hashes)
    assert not set(plain.sequence_hashes) & set(salted.sequence_hashes)
    assert salted.sequence_hashes == same.sequence_hashes


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(5))
def test_an_engine_with_weak_hashes_answers_as_if_each_request_were_alone(
    monkeypatch: pytest.MonkeyPatch, seed: int, depth: int
) -> None:
    monkeypatch.setattr(HASHES, weak)
    rng = random.Random(seed)
    engine, _ = make_engine(num_blocks=40, depth=depth)
    heads = [[rng.randrange(60) for _ in range(12)] for _ in range(3)]
    prompts = {str(i): [*rng.choice(heads)[: rng.randrange(13)], rng.randrange(60), i] for i in range(30)}
    answers: dict[str, list[int]] = {name: [] for name in prompts}
    waiting = list(prompts.items())
    while waiting or engine.has_work:
        for name, prompt in waiting[:3]:
            engine.add(make_sequence(name, prompt, max_tokens=20))
        del waiting[:3]
        for output in engine.step().outputs:
            assert output.finish != "error", output.error
            answers[output.sequence.request_id] += output.token_ids
        assert engine.check_integrity() == []
    assert answers == {name: sequential_answer(prompt, 20) for name, prompt in prompts.items()}
    assert engine.counts().prefix_collisions > 0


class CollidingMachine(BlockMachine):
    """Random traffic with weak hashes. A hit is as deep as the blocks' contents say, or less."""

    def __init__(self) -> None:
        self.patched = patch(HASHES, weak)
        self.patched.start()
        super().__init__()

    @rule(tokens=prompts, pinned=st.booleans(), keep=st.integers(0, 3))
    def allocate(self, tokens: list[int], pinned: bool, keep: int) -> None:
        self.names += 1
        sequence = make_sequence(str(self.names), tokens, prefill_only=pinned, pinned=pinned)
        if self.manager.allocate(sequence, keep_available=keep):
            self.sequences.append(sequence)
        self.check_fresh_blocks(sequence)

    def teardown(self) -> None:
        super().teardown()
        self.patched.stop()


TestFewCollidingMachine, TestManyCollidingMachine = few_and_many(CollidingMachine, many=80, steps=40)
