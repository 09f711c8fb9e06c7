"""The block manager by itself: a few cases by hand, then anything at all against a plain dict."""

from collections.abc import Callable

import pytest

from baton_proto.kv_events import Removed
from engine.blocks.block_manager import BlockManager
from engine.blocks.resting import LONG_TOKENS, OUTPUT, SHORT
from tests.engine.blocks.block_machine import BlockMachine, allocated, compute, computed, few_and_many, served
from tests.engine.kv_oracle import EventReplica, make_sequence, u64


def test_eviction_takes_leaves_first_and_the_least_recently_used_chain_first() -> None:
    manager = BlockManager(4, 4)
    old, young = make_sequence("old", range(8)), make_sequence("young", range(50, 58))
    for sequence in (old, young):
        assert manager.allocate(sequence)
        compute(manager, sequence)
    manager.free(old)
    manager.free(young)
    assert (manager.num_free, manager.num_cached, manager.num_used) == (0, 4, 0)
    manager.cache.take_events()
    assert manager.allocate(make_sequence("new", range(90, 101)))
    [event] = manager.cache.take_events()
    assert isinstance(event, Removed)
    assert u64(event.sequence_hashes) == [*reversed(old.sequence_hashes), young.sequence_hashes[1]]
    assert manager.check_integrity() == []


def test_blocks_that_were_reused_outlive_younger_ones_that_were_not() -> None:
    manager = BlockManager(8, 4)

    def serve(name: str, first_token: int) -> int:
        sequence = allocated(manager, name, [*range(first_token, first_token + 8), 999])
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
        served(manager, name, range(first_token, first_token + num_tokens))
    served(manager, "newcomer", range(2 * 10**6, 2 * 10**6 + LONG_TOKENS // 2))
    assert manager.check_integrity() == []
    again = allocated(manager, "again", range(LONG_TOKENS // 8 + 1))
    assert again.num_cached_tokens == LONG_TOKENS // 8


def test_answers_are_given_up_before_older_prompts() -> None:
    manager = BlockManager(8, 4)
    prompt = make_sequence("prompt", range(8))
    answer = make_sequence("answer", range(100, 116), num_prompt_tokens=4)
    for sequence in (prompt, answer):
        assert manager.allocate(sequence)
        compute(manager, sequence)
        manager.free(sequence)
    served(manager, "newcomer", range(200, 212))
    assert manager.check_integrity() == []
    again = allocated(manager, "again", [*range(8), 99])
    assert again.num_cached_tokens == 8


def test_runs_of_interleaved_sequences_are_merged() -> None:
    manager = BlockManager(64, 4)
    sequences = [make_sequence(str(i), range(100 * i, 100 * i + 40)) for i in range(1, 4)]
    for sequence in sequences:
        assert manager.allocate(sequence)
    for end in range(4, 41, 4):
        for sequence in sequences:
            compute(manager, sequence, end)
    assert [u64(run.sequence_hashes) for run in manager.cache.runs()] == [s.sequence_hashes for s in sequences]


TestFewBlockMachine, TestManyBlockMachine = few_and_many(BlockMachine, many=80, steps=40)


def test_blocks_that_evictions_gave_up_are_one_run_again() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    first, second = (make_sequence(str(seed), [seed * 100 + i for i in range(32)]) for seed in (1, 2))
    assert manager.allocate(first)
    first.num_computed_tokens = 32
    manager.commit(first)
    manager.free(first)
    assert manager.allocate(second)
    assert second.block_table == list(range(8))


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_a_pool_may_be_one_block_of_one_token_but_not_less() -> None:
    smallest = BlockManager(1, 1)
    assert smallest.allocate(make_sequence("a", [1]))
    assert not smallest.allocate(make_sequence("b", [2]))
    for num_blocks, block_size in ((0, 1), (1, 0)):
        with pytest.raises(AssertionError):
            BlockManager(num_blocks, block_size)


@pytest.mark.parametrize(("num_tokens", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (20, 8)])
def test_the_tokens_that_are_cached_are_known_before_a_sequence_gets_blocks(num_tokens: int, cached: int) -> None:
    manager = BlockManager(16, 4)
    computed(manager, "first", range(11))
    again = make_sequence("again", range(num_tokens))
    assert len(manager.tiers.usable_hits(again)) * 4 == cached
    assert manager.allocate(again)
    assert again.num_computed_tokens == again.num_committed_blocks * 4 == cached


def test_the_prefix_hit_of_the_first_allocation_is_the_one_that_counts() -> None:
    manager = BlockManager(16, 4)
    sequence = served(manager, "a", range(9))
    assert (sequence.num_committed_blocks, sequence.num_computed_tokens) == (0, 0)
    sequence.num_preemptions = 1
    assert manager.allocate(sequence)
    assert (sequence.num_computed_tokens, sequence.num_cached_tokens) == (8, 0)


def test_blocks_are_taken_from_the_returned_then_from_the_fresh_then_from_the_cached_ones() -> None:
    manager = BlockManager(8, 4)
    cached, partial = make_sequence("cached", range(8)), make_sequence("partial", [90])
    for sequence in (cached, partial):  # blocks 0 and 1, and block 2
        assert manager.allocate(sequence)
        compute(manager, sequence)
        manager.free(sequence)
    manager.cache.take_events()
    assert (manager.num_free, manager.num_cached) == (6, 2)
    tables = []
    for number, count in enumerate((2, 3, 3)):
        tokens = range(100 + 40 * number, 100 + 40 * number + count * 4)
        sequence = allocated(manager, str(number), tokens)
        tables.append(sequence.block_table)
        assert manager.check_integrity() == []
    assert tables == [[2, 3], [4, 5, 6], [0, 1, 7]]
    (event,) = manager.cache.take_events()
    assert isinstance(event, Removed)
    assert u64(event.sequence_hashes) == [cached.sequence_hashes[1], cached.sequence_hashes[0]]


def test_append_takes_as_many_blocks_as_the_tokens_need_and_none_when_too_few_are_left() -> None:
    manager = BlockManager(5, 4)
    sequence = allocated(manager, "a", range(3))
    sequence.token_ids.extend(range(17))
    assert manager.append(sequence)
    assert len(sequence.block_table) == 5
    sequence.token_ids.append(1)
    assert not manager.append(sequence)
    assert len(sequence.block_table) == 5
    del sequence.token_ids[4:]  # tokens that were dropped leave blocks over
    assert manager.append(sequence)
    assert len(sequence.block_table) == 5
    assert manager.check_integrity() == []


# --- prompts that are computed side by side ---------------------------------------------------------------------------


def test_a_sequence_that_was_overtaken_later_goes_on_with_its_own_blocks_after_the_canonical_ones() -> None:
    manager, replica = BlockManager(16, 4), EventReplica()
    slow, fast = make_sequence("slow", range(20)), make_sequence("fast", [*range(12), *range(50, 58)])
    for sequence in (slow, fast):
        assert manager.allocate(sequence)
    own = list(slow.block_table)
    compute(manager, slow, 4)
    compute(manager, fast, 8)
    compute(manager, fast, 12)
    compute(manager, slow, 7)
    assert slow.num_committed_blocks == 1
    compute(manager, slow, 16)
    assert slow.num_committed_blocks == 4
    assert fast.block_table[0] == own[0]
    assert slow.block_table == [own[0], *fast.block_table[1:3], *own[3:]]
    compute(manager, slow, 20)
    assert slow.num_committed_blocks == 5
    replica.apply(manager.cache.take_events())  # each block once
    assert list(replica.parents) == slow.sequence_hashes
    assert manager.check_integrity() == []
    third = allocated(manager, "third", range(21))
    assert third.block_table[:5] == slow.block_table
    manager.free(slow)
    assert manager.check_integrity() == []


def test_copies_are_kept_while_a_step_may_read_them_and_given_up_when_it_has_ended() -> None:
    manager = BlockManager(16, 4)
    first, second = make_sequence("first", range(13)), make_sequence("second", range(13))
    for sequence in (first, second):
        assert manager.allocate(sequence)
    own = list(second.block_table)
    compute(manager, first)
    second.num_in_flight_tokens = 5
    compute(manager, second, 4)
    compute(manager, second, 12)
    assert second.retired_blocks == own[:3]
    assert manager.check_integrity() == []
    free = manager.num_free
    manager.settle(second)
    assert second.retired_blocks == []
    assert manager.num_free == free + 3
    manager.settle(second)
    assert manager.num_free == free + 3
    assert manager.check_integrity() == []


def test_a_settled_step_does_not_give_up_the_copies_that_a_transfer_reads() -> None:
    manager = BlockManager(16, 4)
    first, pinned = make_sequence("first", range(9)), make_sequence("pinned", range(9), prefill_only=True, pinned=True)
    for sequence in (first, pinned):
        assert manager.allocate(sequence)
    own = pinned.block_table[:2]
    compute(manager, first)
    compute(manager, pinned)
    manager.settle(pinned)
    assert pinned.retired_blocks == own
    assert manager.check_integrity() == []


@pytest.mark.parametrize("ends", [[15], [4, 15], [4, 8, 12, 15], [7, 11, 15], [12, 15]])
def test_blocks_that_the_prompt_fills_are_the_prompts_and_all_others_the_answers(ends: list[int]) -> None:
    manager = BlockManager(8, 4)
    sequence = make_sequence("a", range(15), num_prompt_tokens=10)  # two blocks, and half a third one
    assert manager.allocate(sequence)
    for end in ends:
        compute(manager, sequence, end)
    kinds = manager.cache.table.kinds
    assert [kinds[block] for block in sequence.block_table[:3]] == [SHORT, SHORT, OUTPUT]


# --- the check of the books -------------------------------------------------------------------------------------------


def books() -> BlockManager:
    """Holders: `a`, of blocks 0 and 1 (cached) and 2, and `p`, of 0, 1 and 5, with copies 3 and 4. Blocks 6 and 7 are
    cached and rest, 8 was returned, and 9 was never used."""
    manager = BlockManager(10, 4)
    sequences = [
        make_sequence("a", range(12)),
        make_sequence("p", range(12), prefill_only=True, pinned=True),
        make_sequence("gone", range(50, 62)),
    ]
    for sequence in sequences:
        assert manager.allocate(sequence)
    compute(manager, sequences[0], 8)
    compute(manager, sequences[1], 12)
    compute(manager, sequences[2], 8)
    manager.free(sequences[2])
    return manager


def test_the_books_of_the_check_are_sound() -> None:
    manager = books()
    a, p = manager.holders
    assert (a.block_table, p.block_table, p.retired_blocks) == ([0, 1, 2], [0, 1, 5], [3, 4])
    assert (manager.num_free, manager.num_cached, manager.num_used) == (2, 2, 6)
    assert manager.check_integrity() == []


@pytest.mark.parametrize(
    ("damage", "problems"),
    [
        (
            lambda manager: setattr(manager.holders[1], "num_computed_tokens", 13),
            ["<Sequence p waiting computed 13/12 blocks 3> has computed more tokens than its blocks hold"],
        ),
        (
            lambda manager: setattr(manager.holders[0], "num_committed_blocks", 3),
            ["<Sequence a waiting computed 8/12 blocks 3> has a committed block that is not cached"],
        ),
        (
            lambda manager: manager._references.__setitem__(1, 3),
            ["block 1 counts 3 references, sequences hold 2"],
        ),
        (
            lambda manager: manager.holders[1].retired_blocks.remove(4),
            ["block 4 counts 1 references, sequences hold 0", "2 free + 2 cached + 5 used != 10 blocks"],
        ),
        (
            lambda manager: manager._returned.append(8),
            ["a block was returned twice", "3 free + 2 cached + 6 used != 10 blocks"],
        ),
        (
            lambda manager: manager._returned.append(2),
            ["free block 2 is used or cached", "3 free + 2 cached + 6 used != 10 blocks"],
        ),
        (
            lambda manager: manager._returned.append(7),
            ["free block 7 is used or cached", "3 free + 2 cached + 6 used != 10 blocks"],
        ),
        (lambda manager: manager._returned.pop(), ["1 free + 2 cached + 6 used != 10 blocks"]),
        (
            lambda manager: setattr(manager.cache, "num_resting", 3),
            ["3 blocks should rest, 2 do", "2 free + 3 cached + 6 used != 10 blocks"],
        ),
    ],
)
def test_the_check_tells_each_account_that_is_wrong(
    damage: Callable[[BlockManager], object], problems: list[str]
) -> None:
    manager = books()
    damage(manager)
    assert manager.check_integrity() == problems
