"""The prefix cache by itself: where a hit ends, in which order blocks are given up, and what its own check sees."""

import tracemalloc
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given

from baton_proto.kv_events import Cleared, KvEvent, Removed, Stored
from engine.blocks.prefix_cache import PrefixCache
from engine.blocks.resting import AGING, KEPT, LONG, LONG_TOKENS, MEDIUM, MEDIUM_TOKENS, SHORT, prompt_kind
from engine.sequences.sequence import Sequence
from tests.engine.kv_oracle import EventReplica, make_sequence, u64

SIZE, NUM_BLOCKS = 4, 1000


def chain(blocks: list[int], tokens: list[int] | None = None) -> Sequence:
    """A sequence in these blocks, all of them full."""
    num_tokens = len(blocks) * SIZE
    sequence = make_sequence("chain", range(num_tokens) if tokens is None else tokens)
    sequence.block_table = blocks
    sequence.hash_blocks(len(blocks), SIZE)
    return sequence


def file(cache: PrefixCache, sequence: Sequence, first: int = 0, kind: int = SHORT) -> None:
    """Caches all blocks of a sequence from `first` on."""
    count = len(sequence.block_table) - first
    assert cache.insert(sequence, first, bytes([kind]) * count) == count


def stored(cache: PrefixCache) -> list[tuple[int | None, list[int], list[int]]]:
    """The events, all of which store blocks: (parent, block hashes, sequence hashes)."""
    return [told(event) for event in cache.take_events()]


def told(event: KvEvent) -> tuple[int | None, list[int], list[int]]:
    assert isinstance(event, Stored)
    return event.parent, u64(event.block_hashes), u64(event.sequence_hashes)


@pytest.mark.parametrize(
    ("num_tokens", "kind"),
    [(1, SHORT), (MEDIUM_TOKENS - 1, SHORT), (MEDIUM_TOKENS, MEDIUM), (LONG_TOKENS - 1, MEDIUM), (LONG_TOKENS, LONG)],
)
def test_the_length_of_a_prompt_tells_the_kind_of_its_blocks(num_tokens: int, kind: int) -> None:
    assert prompt_kind(num_tokens) == kind


# --- hits -------------------------------------------------------------------------------------------------------------


def test_a_hit_begins_where_it_is_asked_for_and_ends_where_the_cache_or_the_question_does() -> None:
    cache, blocks = PrefixCache(SIZE, NUM_BLOCKS), [3, 0, 5, 1]
    file(cache, chain(blocks))
    for first in range(5):
        longer = chain([*blocks[:first], *range(10, 17 - first)], [*range(16), *range(70, 82)])
        for end in range(first, 7):
            assert cache.table.match(longer, first, end) == blocks[first:end]
    assert cache.table.num_collisions == 0


def test_a_hash_that_is_missing_between_two_known_ones_ends_the_hit() -> None:
    cache = PrefixCache(SIZE, NUM_BLOCKS)
    file(cache, chain([0, 2, 3, 1]))
    asking = chain([0, 2, 3, 1])
    asking.sequence_hashes[1] = 12345  # a collision made the later ones known
    assert cache.table.match(asking, 0, 4) == [0]


def test_each_look_that_meets_another_prefix_is_counted() -> None:
    cache = PrefixCache(SIZE, NUM_BLOCKS)
    theirs = chain([0, 1, 2])
    file(cache, theirs)
    ours = chain([3, 4, 5], [*range(4), *range(60, 68)])
    ours.sequence_hashes = list(theirs.sequence_hashes)
    assert [cache.table.match(ours, 0, 3) for _ in range(2)] == [[0], [0]]
    assert cache.table.num_collisions == 2


def test_sequences_of_another_hash_seed_hit_nothing_even_when_their_hashes_are_the_same() -> None:
    cache = PrefixCache(SIZE, NUM_BLOCKS)
    theirs = chain([0, 1])
    file(cache, theirs)
    salted = chain([2, 3])
    salted.hash_seed = 42
    salted.sequence_hashes = list(theirs.sequence_hashes)
    assert cache.table.match(salted, 0, 2) == []


def test_only_cached_blocks_are_held() -> None:
    cache = PrefixCache(SIZE, NUM_BLOCKS)
    file(cache, chain([3, 1]))
    assert [block for block in range(10) if cache.table.holds(block)] == [1, 3]
    assert len(cache.table.block_of) == 2


# --- what is cached, and announced ------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [[1, 1, 1, 1], [4], [1, 3], [2, 2], [3, 1]])
def test_a_chain_is_cached_piece_by_piece_and_each_piece_announced_below_the_one_before(pieces: list[int]) -> None:
    cache, blocks, first = PrefixCache(SIZE, NUM_BLOCKS), [3, 0, 6, 1], 0
    whole = chain(blocks)
    for count in pieces:
        growing = chain(blocks[: first + count])
        file(cache, growing, first)
        parent = whole.sequence_hashes[first - 1] if first else None
        run = slice(first, first + count)
        assert stored(cache) == [(parent, whole.block_hashes[run], whole.sequence_hashes[run])]
        first += count
        assert cache.table.match(whole, 0, 4) == blocks[:first]
    assert cache.check_integrity([1] * 7) == []


def test_a_block_whose_hash_is_taken_stays_out_and_so_do_those_after_it() -> None:
    cache = PrefixCache(SIZE, NUM_BLOCKS)
    file(cache, chain([0, 1]))
    stored(cache)
    ours = chain([2, 3, 4, 5], list(range(60, 76)))
    ours.sequence_hashes[2] = chain([0, 1]).sequence_hashes[1]
    assert cache.insert(ours, 0, bytes([SHORT]) * 4) == 2
    assert stored(cache) == [(None, ours.block_hashes[:2], ours.sequence_hashes[:2])]
    assert cache.table.match(ours, 0, 2) == [2, 3]
    assert not cache.table.holds(4)
    assert not cache.table.holds(5)
    assert cache.insert(ours, 2, bytes([SHORT]) * 2) == 0
    assert not cache.has_events


def test_a_fork_is_told_as_the_run_it_grows_from_and_a_run_below_the_fork() -> None:
    cache = PrefixCache(SIZE, NUM_BLOCKS)
    trunk, branch = chain([0, 1, 2]), chain([0, 1, 3, 4], [*range(8), *range(60, 68)])
    file(cache, trunk)
    file(cache, branch, 2)
    assert [told(run) for run in cache.runs()] == [
        (None, trunk.block_hashes, trunk.sequence_hashes),
        (trunk.sequence_hashes[1], branch.block_hashes[2:], branch.sequence_hashes[2:]),
    ]


def test_a_cached_block_costs_little_more_than_four_bytes_for_each_token() -> None:
    num_blocks, block_size = 500, 512
    sequence = make_sequence("long", range(num_blocks * block_size))
    sequence.block_table = list(range(num_blocks))
    sequence.hash_blocks(num_blocks, block_size)
    tracemalloc.start()
    try:
        cache = PrefixCache(block_size, NUM_BLOCKS)
        file(cache, sequence)
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 4 * block_size <= kept_bytes / num_blocks < 5 * block_size


# --- rest, reuse, eviction --------------------------------------------------------------------------------------------


def test_blocks_that_are_not_cached_are_given_back_instead_of_resting() -> None:
    cache = PrefixCache(SIZE, NUM_BLOCKS)
    file(cache, chain([0, 1]))  # the cache has heard of no block above 1
    assert cache.rest([2, 7, 1]) == [2, 7]
    assert cache.rest([0]) == []
    assert cache.num_resting == 2
    assert cache.check_integrity([0, 0]) == []


def test_a_block_that_has_just_come_to_rest_can_be_evicted() -> None:
    cache, sequence = PrefixCache(SIZE, NUM_BLOCKS), chain([5])
    file(cache, sequence)
    cache.rest([5])
    assert stored(cache) != []
    assert cache.evict() == 5
    (event,) = cache.take_events()
    assert isinstance(event, Removed)
    assert u64(event.sequence_hashes) == sequence.sequence_hashes
    assert (len(cache.table.block_of), cache.num_resting, cache.runs()) == (0, 0, [])
    assert cache.check_integrity([0] * 6) == []


@given(
    st.lists(st.integers(0, len(AGING) - 1), min_size=1, max_size=12), st.lists(st.booleans(), min_size=12, max_size=12)
)
def test_the_block_that_is_evicted_is_the_oldest_when_each_kind_ages_at_its_own_rate(
    kinds: list[int], evicts: list[bool]
) -> None:
    cache = PrefixCache(SIZE, NUM_BLOCKS)
    rested: dict[int, int] = {}  # block -> how many had come to rest before

    def check_eviction(now: int) -> None:
        oldest = max(rested, key=lambda block: ((now - rested[block]) * AGING[kinds[block]], -kinds[block]))
        del rested[oldest]
        assert cache.evict() == oldest

    for block, kind in enumerate(kinds):
        file(cache, chain([block], list(range(block * SIZE, block * SIZE + SIZE))), kind=kind)
        cache.rest([block])
        rested[block] = block
        if evicts[block]:
            check_eviction(block)
    while rested:
        check_eviction(len(kinds) - 1)
    assert cache.num_resting == 0


def test_a_reused_block_rests_no_more_and_is_of_a_kind_that_ages_more_slowly() -> None:
    cache = PrefixCache(SIZE, NUM_BLOCKS)
    file(cache, chain([0, 1, 2]))
    other = chain([3], list(range(60, 64)))
    file(cache, other)
    cache.rest([2, 1])
    for _ in range(len(AGING)):
        cache.reuse([0, 1], 1)
        assert cache.num_resting == 1
        assert cache.check_integrity([2, 1, 0, 1]) == []
        cache.rest([1])
    cache.rest([3])  # younger, but never reused
    cache.rest([0])
    assert [cache.evict() for _ in range(4)] == [2, 3, 1, 0]


def test_what_rests_is_forgotten_by_a_clear_and_the_rest_is_announced_again() -> None:
    cache, replica = PrefixCache(SIZE, NUM_BLOCKS), EventReplica()
    held, gone = chain([0, 1]), chain([0, 2, 3], [*range(4), *range(60, 68)])
    file(cache, held)
    file(cache, gone, 1)
    cache.rest([3, 2])
    assert sorted(cache.clear()) == [2, 3]
    assert cache.num_resting == 0
    cleared, *events = cache.take_events()
    assert isinstance(cleared, Cleared)
    replica.apply(events)
    assert list(replica.parents) == held.sequence_hashes
    assert cache.check_integrity([1, 1, 0, 0]) == []
    cache.rest([1, 0])
    assert [cache.evict(), cache.evict()] == [1, 0]


def test_what_leaves_the_device_has_a_slot_and_a_clear_asks_for_no_copy_any_more() -> None:
    cache = PrefixCache(SIZE, NUM_BLOCKS, num_slots=2)
    file(cache, chain([0, 1]))
    cache.rest([1, 0])
    assert cache.evict() == 1
    assert cache.moved_down == {NUM_BLOCKS: 1}
    assert cache.num_lowered == 1
    assert cache.clear() == [0]
    assert cache.moved_down == {}
    assert cache.check_integrity([0, 0]) == []


@pytest.mark.parametrize(("num_blocks", "num_slots", "most"), [(8, 0, 2), (4, 8, 3), (3, 0, 0)])
def test_a_quarter_of_all_blocks_may_be_kept_those_of_host_memory_among_them(
    num_blocks: int, num_slots: int, most: int
) -> None:
    cache = PrefixCache(SIZE, num_blocks, num_slots)
    blocks = list(range(min(num_blocks, 4)))
    file(cache, chain(blocks))
    cache.retain(blocks, 10.0)
    assert len(cache.kept) == most


def test_a_prompt_that_was_dropped_is_given_up_before_older_ones_and_a_reused_one_is_not() -> None:
    for reused, order in ((False, [1, 0]), (True, [0, 1])):
        cache = PrefixCache(SIZE, NUM_BLOCKS)
        file(cache, chain([0], list(range(4))))
        file(cache, chain([1], list(range(60, 64))))
        if reused:
            cache.reuse([1], 0)
        cache.drop([1])
        cache.rest([0, 1])
        file(cache, chain([2], [7] * 4))
        cache.rest([2])  # so that the other two have an age
        assert [cache.evict(), cache.evict()] == order


def test_a_block_that_was_kept_is_new_when_its_time_is_over() -> None:
    cache = PrefixCache(SIZE, NUM_BLOCKS)
    file(cache, chain([0], list(range(4))))
    file(cache, chain([1], list(range(60, 64))))
    cache.retain([0], 5.0)
    cache.rest([0, 1])
    cache.expire(4.0)
    assert cache._resting.oldest(cache._now) == (0.0, SHORT), "block 1, and none that ages before it"
    cache.expire(5.0)
    assert cache._resting.oldest(cache._now) == (AGING[SHORT], SHORT), "one block has come to rest since block 1"
    assert [cache.evict(), cache.evict()] == [1, 0]


# --- the check of the books -------------------------------------------------------------------------------------------

REFERENCES = [2, 1, 0, 0, 0]


def books() -> PrefixCache:
    """Blocks 0 and 1 are referenced, 2 rests below 0, and 4 rests below 3."""
    cache = PrefixCache(SIZE, NUM_BLOCKS, num_slots=1, num_copies=1)
    file(cache, chain([0, 1]))
    file(cache, chain([0, 2], [*range(4), *range(60, 64)]), 1)
    file(cache, chain([3, 4], list(range(80, 88))))
    cache.rest([2, 4, 3])
    return cache


def test_sound_books_have_no_problem() -> None:
    assert books().check_integrity(REFERENCES) == []


def unrest(cache: PrefixCache) -> None:
    del cache._resting.by_kind[SHORT][4]
    cache.num_resting -= 1


def give_a_copy(cache: PrefixCache) -> None:
    cache.copies.of[cache.table.sequence_hashes[4]] = cache.copies.free.pop()


def copy_of_a_stranger(cache: PrefixCache) -> None:
    cache.copies.of[77] = cache.copies.free.pop()


def sink_parent(cache: PrefixCache) -> None:
    """Block 3 goes to host memory, and its child stays."""
    at = cache._resting.by_kind[SHORT].pop(3)
    cache.num_resting -= 1
    cache._move(3, slot := cache._free_slots.pop())
    cache._lowered.add(SHORT, slot, at)


def swap_times(cache: PrefixCache) -> None:
    resting = cache._resting.by_kind[SHORT]
    resting[3], resting[4] = resting[4], resting[3]


def test_blocks_that_are_kept_do_not_age_so_a_parent_may_have_rested_before_its_child() -> None:
    cache = books()
    kept = cache._resting.by_kind[KEPT]
    for block in (3, 4):
        cache.kept.add(cache.table.sequence_hashes[block], SHORT, 9.0)
        cache.table.kinds[block] = KEPT
        kept[block] = cache._resting.by_kind[SHORT].pop(block)
    kept[3], kept[4] = kept[4], kept[3]
    assert cache.check_integrity(REFERENCES) == []


def unfile_last(cache: PrefixCache) -> None:
    del cache.table.block_of[cache.table.sequence_hashes[4]]


@pytest.mark.parametrize(
    ("damage", "problems"),
    [
        (
            lambda cache: cache.table.block_of.update({99: 1}),
            ["two sequence hashes name one block", "block 1 is filed under a foreign hash"],
        ),
        (unfile_last, ["blocks [4] are cached by one account only", "resting block 4 is not cached"]),
        (
            lambda cache: cache.table.seeds.update({1: 5}),
            ["hash seeds are kept of other blocks than those without a parent"],
        ),
        (
            lambda cache: cache.table.seeds.pop(3),
            ["hash seeds are kept of other blocks than those without a parent"],
        ),
        (lambda cache: setattr(cache, "num_resting", 5), ["5 blocks should rest, 3 do"]),
        (
            lambda cache: cache.table.sequence_hashes.__setitem__(1, 7),
            ["block 1 is filed under a foreign hash"],
        ),
        (lambda cache: cache.table._parents.__setitem__(1, 9), ["the parent of cached block 1 is not cached"]),
        (
            lambda cache: cache.table.kinds.__setitem__(0, LONG),
            [f"block {block} grows old more slowly than its parent 0" for block in (1, 2)],
        ),
        (swap_times, ["block 4 would be evicted after its parent 3"]),
        (lambda cache: cache.table.kinds.__setitem__(4, LONG), ["block 4 rests in the wrong place"]),
        (unrest, ["cached block 4 has 0 references, resting False"]),
        (lambda cache: cache.kept.add(9, SHORT, 1.0), ["other blocks are kept than are booked as kept"]),
        (sink_parent, [f"parent {NUM_BLOCKS} of block 4 lies in a lower tier"]),
        (give_a_copy, ["block 4 has a copy on the disk, and its parent 3 has none"]),
        (copy_of_a_stranger, ["1 copies are of blocks that are not cached"]),
        (
            lambda cache: cache._free_slots.pop(),
            ["the slots of host memory are not those that are free, hold a block or are being used"],
        ),
    ],
)
def test_each_account_that_is_wrong_is_told(damage: Callable[[PrefixCache], object], problems: list[str]) -> None:
    cache = books()
    damage(cache)
    assert cache.check_integrity(REFERENCES) == problems


@pytest.mark.parametrize(
    ("references", "problems"),
    [
        (
            [2, 1, 0, 0, 1],
            [
                "cached block 4 has 1 references, resting True",
                "parent 3 of referenced block 4 is not referenced",
            ],
        ),
        ([2, 0, 0, 0, 0], ["cached block 1 has 0 references, resting False"]),
        (
            [0, 1, 0, 0, 0],
            [
                "cached block 0 has 0 references, resting False",
                "parent 0 of referenced block 1 is not referenced",
            ],
        ),
    ],
)
def test_references_that_do_not_fit_what_rests_are_told(references: list[int], problems: list[str]) -> None:
    assert books().check_integrity(references) == problems
