"""The block manager by itself: a few cases by hand, then anything at all against a plain dict."""

import time

from hypothesis import settings

from baton_proto.kv_events import Cleared, Removed, Stored
from engine.core.block_manager import BlockManager
from engine.core.resting import LONG_TOKENS
from tests.engine.core.block_machine import BlockMachine, compute
from tests.engine.kv_oracle import EventReplica, make_sequence, u64


def test_a_prefix_hit_skips_computed_blocks() -> None:
    manager = BlockManager(16, 4)
    first = make_sequence("first", range(10))
    assert manager.allocate(first)
    compute(manager, first)
    second = make_sequence("second", [*range(8), 77, 78, 79])
    assert manager.allocate(second)
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    assert second.num_computed_tokens == second.num_cached_tokens == 8
    assert manager.check_integrity() == []


def test_the_last_token_is_always_left_to_compute() -> None:
    manager = BlockManager(16, 4)
    first = make_sequence("first", range(8))
    assert manager.allocate(first)
    compute(manager, first)
    same = make_sequence("same", range(8))
    assert manager.allocate(same)
    assert same.num_computed_tokens == 4


def test_a_sequence_moves_to_the_canonical_block_when_another_was_faster() -> None:
    manager = BlockManager(16, 4)
    a, b = make_sequence("a", range(9)), make_sequence("b", range(9))
    assert manager.allocate(a)
    assert manager.allocate(b)
    assert not set(a.block_table) & set(b.block_table)
    compute(manager, a)
    free = manager.num_free
    compute(manager, b)
    assert b.block_table[:2] == a.block_table[:2]
    assert b.block_table[2] != a.block_table[2]
    assert manager.num_free == free + 2
    [event] = manager.take_events()
    assert isinstance(event, Stored)
    assert len(u64(event.sequence_hashes)) == 2
    assert manager.check_integrity() == []


def test_a_pinned_sequence_keeps_its_own_copy_until_it_is_freed() -> None:
    manager = BlockManager(16, 4)
    a = make_sequence("a", range(9))
    pinned = make_sequence("pinned", range(9), prefill_only=True, pinned=True)
    assert manager.allocate(a)
    assert manager.allocate(pinned)
    own = pinned.block_table[:2]
    compute(manager, a)
    free = manager.num_free
    compute(manager, pinned)
    assert pinned.block_table[:2] == a.block_table[:2]
    assert pinned.retired_blocks == own
    assert manager.num_free == free
    assert manager.check_integrity() == []
    manager.free(pinned)
    assert manager.num_free == free + 3
    assert manager.check_integrity() == []


def test_eviction_takes_leaves_first_and_the_least_recently_used_chain_first() -> None:
    manager = BlockManager(4, 4)
    old, young = make_sequence("old", range(8)), make_sequence("young", range(50, 58))
    for sequence in (old, young):
        assert manager.allocate(sequence)
        compute(manager, sequence)
    manager.free(old)
    manager.free(young)
    assert (manager.num_free, manager.num_cached, manager.num_used) == (0, 4, 0)
    manager.take_events()
    assert manager.allocate(make_sequence("new", range(90, 101)))
    [event] = manager.take_events()
    assert isinstance(event, Removed)
    assert u64(event.sequence_hashes) == [*reversed(old.sequence_hashes), young.sequence_hashes[1]]
    assert manager.check_integrity() == []


def test_blocks_that_were_reused_outlive_younger_ones_that_were_not() -> None:
    manager = BlockManager(8, 4)

    def serve(name: str, first_token: int) -> int:
        sequence = make_sequence(name, [*range(first_token, first_token + 8), 999])
        assert manager.allocate(sequence)
        cached = sequence.num_cached_tokens
        compute(manager, sequence)
        manager.free(sequence)
        assert manager.check_integrity() == []
        return cached

    assert serve("system prompt", 0) == 0
    for _ in range(4):
        assert serve("system prompt again", 0) == 8
    for number in range(1, 5):  # more than the pool holds beside it
        serve("once", 100 * number)
    assert serve("the system prompt is still there", 0) == 8
    assert serve("the oldest of the others is not", 100) == 0
    for number in range(5, 30):
        serve("once", 100 * number)
    assert serve("nothing lives for ever", 0) == 0


def test_long_prompts_are_given_up_before_older_short_ones() -> None:
    manager = BlockManager(12, LONG_TOKENS // 8)
    for name, first_token, num_tokens in (("short", 0, LONG_TOKENS // 8), ("long", 10**6, LONG_TOKENS)):
        sequence = make_sequence(name, range(first_token, first_token + num_tokens))
        assert manager.allocate(sequence)
        compute(manager, sequence)
        manager.free(sequence)
    newcomer = make_sequence("newcomer", range(2 * 10**6, 2 * 10**6 + LONG_TOKENS // 2))
    assert manager.allocate(newcomer)
    compute(manager, newcomer)
    manager.free(newcomer)
    assert manager.check_integrity() == []
    again = make_sequence("again", range(LONG_TOKENS // 8 + 1))
    assert manager.allocate(again)
    assert again.num_cached_tokens == LONG_TOKENS // 8


def test_answers_are_given_up_before_older_prompts() -> None:
    manager = BlockManager(8, 4)
    prompt = make_sequence("prompt", range(8))
    answer = make_sequence("answer", range(100, 116), num_prompt_tokens=4)
    for sequence in (prompt, answer):
        assert manager.allocate(sequence)
        compute(manager, sequence)
        manager.free(sequence)
    newcomer = make_sequence("newcomer", range(200, 212))
    assert manager.allocate(newcomer)
    compute(manager, newcomer)
    manager.free(newcomer)
    assert manager.check_integrity() == []
    again = make_sequence("again", [*range(8), 99])
    assert manager.allocate(again)
    assert again.num_cached_tokens == 8


def test_allocation_that_does_not_fit_changes_nothing() -> None:
    manager = BlockManager(4, 4)
    first = make_sequence("first", range(8))
    assert manager.allocate(first)
    compute(manager, first)
    manager.free(first)
    manager.take_events()
    # One block of it is cached and at rest: using it leaves three, where four are missing.
    large = make_sequence("large", [*range(4), *range(50, 63)])
    assert not manager.allocate(large)
    assert large.block_table == []
    assert (manager.num_free, manager.num_cached) == (2, 2)
    assert manager.take_events() == []
    assert not manager.allocate(make_sequence("modest", range(70, 78)), keep_available=3)
    assert manager.allocate(make_sequence("modest", range(70, 78)), keep_available=2)


def test_append_takes_a_block_when_the_last_one_is_full() -> None:
    manager = BlockManager(2, 4)
    sequence = make_sequence("a", range(4))
    assert manager.allocate(sequence)
    sequence.token_ids.append(1)
    assert manager.append(sequence)
    assert len(sequence.block_table) == 2
    sequence.token_ids.extend([1, 2, 3])
    assert manager.append(sequence)
    sequence.token_ids.append(4)
    assert not manager.append(sequence)
    assert len(sequence.block_table) == 2


def test_clear_announces_again_what_sequences_still_hold() -> None:
    manager = BlockManager(16, 4)
    kept, gone = make_sequence("kept", range(8)), make_sequence("gone", [*range(4), *range(50, 58)])
    for sequence in (kept, gone):
        assert manager.allocate(sequence)
        compute(manager, sequence)
    manager.free(gone)
    manager.clear()
    events = manager.take_events()
    assert isinstance(events[0], Cleared)
    replica = EventReplica()
    replica.apply(events)
    assert list(replica.parents) == kept.sequence_hashes
    assert manager.num_cached == 0
    assert manager.check_integrity() == []
    manager.free(kept)
    manager.clear()
    assert manager.num_free == 16
    assert manager.take_events() == [Cleared()]


def test_runs_of_interleaved_sequences_are_merged() -> None:
    manager = BlockManager(64, 4)
    sequences = [make_sequence(str(i), range(100 * i, 100 * i + 40)) for i in range(1, 4)]
    for sequence in sequences:
        assert manager.allocate(sequence)
    for end in range(4, 41, 4):
        for sequence in sequences:
            compute(manager, sequence, end)
    assert [u64(run.sequence_hashes) for run in manager.runs()] == [s.sequence_hashes for s in sequences]


def test_check_integrity_sees_a_leaked_reference() -> None:
    manager = BlockManager(8, 4)
    sequence = make_sequence("a", range(8))
    assert manager.allocate(sequence)
    compute(manager, sequence)
    sequence.block_table.pop()
    assert manager.check_integrity() != []


def test_operations_stay_cheap_in_a_large_pool() -> None:
    manager = BlockManager(100_000, 16)
    started_s = time.perf_counter()
    for i in range(100):  # 200,000 blocks go through a pool of 100,000
        sequence = make_sequence(str(i), range(i * 40_000, i * 40_000 + 32_000))
        assert manager.allocate(sequence)
        compute(manager, sequence)
        manager.free(sequence)
    per_block_us = (time.perf_counter() - started_s) * 1e6 / 200_000
    assert manager.num_cached == 100_000
    assert per_block_us < 50  # measured 3; a scan of the pool would take thousands


BlockMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestBlockMachine = BlockMachine.TestCase


def test_blocks_that_evictions_gave_up_are_one_run_again() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    first, second = (make_sequence(str(seed), [seed * 100 + i for i in range(32)]) for seed in (1, 2))
    assert manager.allocate(first)
    first.num_computed_tokens = 32
    manager.commit(first)
    manager.free(first)
    assert manager.allocate(second)
    assert second.block_table == list(range(8))
