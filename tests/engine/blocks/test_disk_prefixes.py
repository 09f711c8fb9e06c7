"""Copies that an earlier process left: which of them are known again, as what, and in which order they are given up."""

from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from baton_proto.kv_events import DISK, Stored
from engine.blocks.disk_copies import DiskBlock
from engine.blocks.disk_prefixes import DiskPrefixCache
from engine.blocks.resting import AGING, KEPT, LONG, OUTPUT, SHORT
from tests.engine.kv_oracle import make_sequence, u64

SIZE, SLOTS, COPIES = 2, 4, 40
FIRST = 8 + SLOTS


def name_of(node: int) -> int:
    """A sequence hash."""
    return 1000 + node


def disk_block(node: int, parent: int | None, kind: int = SHORT) -> DiskBlock:
    tokens = np.array([node, node + 1], "<u4").tobytes()
    above = None if parent is None else name_of(parent)
    return DiskBlock(name_of(node), above, 2000 + node, 0 if parent is not None else 7 + node, kind, tokens)


def adopted(found: list[DiskBlock]) -> DiskPrefixCache:
    """`found`: the youngest first. A copy's slot is its place in the list."""
    cache = DiskPrefixCache(SIZE, 8, SLOTS, COPIES)
    cache.adopt((FIRST + at, block) for at, block in enumerate(found))
    return cache


@st.composite
def forests(draw: st.DrawFn) -> list[DiskBlock]:
    """Trees of which some blocks are gone and some were written twice, in any order."""
    size = draw(st.integers(1, 14))
    blocks = []
    for node in range(size):
        parent = draw(st.none() | st.integers(0, node - 1)) if node else None
        blocks.append(disk_block(node, parent, draw(st.integers(0, KEPT))))
    return draw(st.lists(st.sampled_from(blocks), max_size=COPIES // 2))


@given(forests())
def test_a_copy_is_known_again_when_all_above_it_are(found: list[DiskBlock]) -> None:
    cache = adopted(found)
    youngest: dict[int, tuple[int, DiskBlock]] = {}
    for at, block in enumerate(found):
        youngest.setdefault(block.sequence_hash, (FIRST + at, block))

    def whole(name: int | None) -> bool:
        return name is None or (name in youngest and whole(youngest[name][1].parent))

    expected = {name: copy for name, (copy, _) in youngest.items() if whole(name)}
    assert cache.copies.of == expected
    assert set(cache.copies.free) == set(range(FIRST, FIRST + COPIES)) - set(expected.values())
    assert cache.check_integrity([0] * (FIRST + COPIES)) == []
    told: list[int] = []
    for event in cache.take_events():
        assert isinstance(event, Stored)
        assert event.home == DISK
        assert event.parent is None or event.parent in told
        for block_hash, name in zip(u64(event.block_hashes), u64(event.sequence_hashes), strict=True):
            assert block_hash == youngest[name][1].block_hash
            told.append(name)
    assert sorted(told) == sorted(expected)
    parents = {name: block.parent for name, (_, block) in youngest.items()}
    for name, copy in expected.items():
        block = youngest[name][1]
        assert cache.stored_block(copy)._replace(kind=0) == block._replace(kind=0)
        below = [other for other in expected if name in lineage(other, parents)]
        assert cache.table.kinds[copy] == min(KEPT - 1, max(youngest[other][1].kind for other in below))


def lineage(name: int | None, parents: dict[int, int | None]) -> set[int]:
    """It and all above it."""
    found = set()
    while name is not None:
        found.add(name)
        name = parents[name]
    return found


@given(forests())
def test_what_was_found_is_given_up_children_first_and_of_the_rest_the_oldest(found: list[DiskBlock]) -> None:
    found = [block._replace(kind=SHORT) for block in found]
    cache = adopted(found)
    ranks = {block.sequence_hash: at for at, block in reversed(list(enumerate(found)))}
    given_up = []
    while len(cache._stored):
        _, kind = cache._stored.oldest(cache._now)
        copy, _ = cache._stored.pop(kind)
        given_up.append(cache.table.sequence_hashes[copy])
    parents = {block.sequence_hash: block.parent for block in found}
    needed = {name: min(ranks[other] for other in given_up if name in lineage(other, parents)) for name in given_up}
    for place, name in enumerate(given_up):
        assert parents[name] not in given_up[:place]
        later = given_up[place + 1 :]
        assert all(needed[other] <= needed[name] for other in later), "the rank of a prefix is that of its youngest"


def test_an_adopted_prefix_is_hit_by_its_tokens_and_its_seed_alone() -> None:
    wanted = make_sequence("wanted", [5, 6, 7, 8])
    wanted.hash_blocks(2, SIZE)
    names, seeds = wanted.sequence_hashes, wanted.hash_seed
    tokens = [np.array(pair, "<u4").tobytes() for pair in ((5, 6), (7, 8))]
    blocks = [
        DiskBlock(names[1], names[0], 31, 0, SHORT, tokens[1]),
        DiskBlock(names[0], None, 30, seeds, SHORT, tokens[0]),
    ]
    assert adopted(blocks).table.match(wanted, 0, 2) == [FIRST + 1, FIRST]
    assert adopted([blocks[0], blocks[1]._replace(seed=seeds + 1)]).table.match(wanted, 0, 2) == []
    assert adopted([blocks[0]._replace(tokens=tokens[0]), blocks[1]]).table.match(wanted, 0, 2) == [FIRST + 1]


def on_the_device(cache: DiskPrefixCache) -> None:
    """The first copy's block moves to block 0, and a block without a copy is in block 1; nobody uses them."""
    cache.keep([FIRST])
    cache.raise_to([0], [FIRST])
    other = make_sequence("other", [1, 2])
    other.block_table = [1]
    other.hash_blocks(1, SIZE)
    assert cache.insert(other, 0, bytes([SHORT])) == 1


def test_a_clear_forgets_the_copies_of_blocks_that_are_in_use_too() -> None:
    cache = adopted([disk_block(1, None), disk_block(2, None)])
    on_the_device(cache)
    assert cache.clear() == []
    assert not cache.copies.of
    assert sorted(cache.copies.free) == list(range(FIRST, FIRST + COPIES))
    assert len(cache.table.block_of) == 2, "the blocks of the device"
    assert cache.check_integrity([1, 1]) == []


def test_a_block_that_leaves_memory_moves_to_its_copy_and_without_one_it_is_forgotten() -> None:
    cache = adopted([disk_block(1, None)])
    on_the_device(cache)
    cache.rest([1, 0])
    assert cache.evict() == 1
    cache._give_up_slot(SHORT)
    assert len(cache.table.block_of) == 1
    assert cache.evict() == 0
    assert cache.content(FIRST) is None
    (kind,) = [kind for kind, queue in enumerate(cache._lowered.by_kind) if queue]
    cache._give_up_slot(kind)
    assert cache.copies.of == {name_of(1): FIRST}
    assert cache.table.holds(FIRST)
    slot = cache.content(FIRST)
    assert slot in range(8, FIRST), "until another block takes the slot, the content is in memory, too"
    assert cache.moved_down == {slot: 0}
    cache.moved_down.clear()
    assert cache.check_integrity([0, 0]) == []


# --- writes and reads -------------------------------------------------------------------------------------------------


def cached(num_slots: int, num_copies: int, num_roots: int = 0) -> DiskPrefixCache:
    """Prompts of one block each, at rest on the device in blocks 0 and up, the oldest first."""
    cache = DiskPrefixCache(SIZE, 8, num_slots, num_copies)
    for block in range(num_roots):
        insert(cache, block, [1 + block, 0])
    cache.rest(list(range(num_roots)))
    return cache


def insert(cache: DiskPrefixCache, block: int, tokens: list[int], kind: int = SHORT) -> int:
    """The last block of these tokens lies in `block`. Returns its sequence hash."""
    sequence = make_sequence("request", tokens)
    num_blocks = len(tokens) // SIZE
    sequence.block_table = [block] * num_blocks
    sequence.hash_blocks(num_blocks, SIZE)
    assert cache.insert(sequence, num_blocks - 1, bytes([kind])) == 1
    return sequence.sequence_hashes[-1]


def names_of(cache: DiskPrefixCache) -> set[int]:
    return set(cache.table.block_of)


def end_writes(cache: DiskPrefixCache) -> None:
    for copy in list(cache.copies.writes):
        cache.written(copy, True)
    cache.copies.to_write.clear()
    cache.moved_down.clear()


@pytest.mark.parametrize("max_writes", [1, 2, 10])
def test_old_blocks_are_written_until_half_of_the_slots_can_be_had_and_none_is_lost(max_writes: int) -> None:
    cache = cached(4, 9, 4)
    before = names_of(cache)
    for _ in range(4):
        cache.evict()
    cache.write_behind(max_writes)
    assert len(cache.copies.writes) == min(2, max_writes)
    assert names_of(cache) == before, "all are known still, the one in the first slot too"
    end_writes(cache)
    cache.write_behind(max_writes)
    assert len(cache.copies.staged) + len(cache.copies.writes) == 2
    assert names_of(cache) == before


def test_a_disk_that_cannot_be_written_gets_nothing_and_nothing_is_given_up_for_it() -> None:
    cache = cached(4, 9, 4)
    for _ in range(4):
        cache.evict()
    cache.write_behind(0)
    cache.write_all(0)
    assert cache.num_lowered == 4
    assert not cache.copies.of
    cache.write_all(9)
    end_writes(cache)
    assert len(cache.copies.of) == 4
    cache.write_behind(0)
    cache.write_all(9)
    assert cache.num_lowered == 4, "what is written stays in memory while nobody needs the room"


def test_blocks_in_host_memory_that_have_copies_move_there_until_half_of_the_slots_can_be_had() -> None:
    cache = cached(4, 9, 4)
    for _ in range(4):
        cache.evict()
    cache.write_all(9)
    end_writes(cache)
    cache.write_behind(9)
    assert (len(cache.copies.staged), cache.num_lowered) == (2, 2)
    assert not cache.copies.writes


def test_the_youngest_block_is_written_too_when_it_takes_the_last_slot() -> None:
    cache = cached(1, 9, 1)
    cache.evict()
    cache.write_behind(1)
    assert len(cache.copies.writes) == 1


@pytest.mark.parametrize("num_children", [3, 4])
def test_a_parent_on_the_device_is_written_before_its_children_and_the_last_slot_is_given_up_for_it(
    num_children: int,
) -> None:
    cache = cached(4, 9)
    parent = insert(cache, 0, [1, 2])
    children = [insert(cache, 1 + child, [1, 2, 10 + child, 0]) for child in range(num_children)]
    cache.rest([*range(1, 1 + num_children), 0])
    for _ in range(num_children):
        cache.evict()
    cache.moved_down.clear()
    cache.write_behind(1)
    assert len(cache.copies.writes) == 1
    first = cache.copies.to_write[0]
    assert first[2].sequence_hash == parent
    assert cache.moved_down == {first[0]: 0}
    assert names_of(cache) == {parent, *children[num_children - 3 :]}


@pytest.mark.parametrize("write", [DiskPrefixCache.write_all, DiskPrefixCache.write_behind])
def test_a_block_whose_write_does_not_count_any_more_is_not_written_again_before_that_has_ended(
    write: Callable[[DiskPrefixCache, int], None],
) -> None:
    cache = cached(4, 9, 4)
    for _ in range(4):
        cache.evict()
    cache.write_all(2)
    first, second = cache.copies.writes
    cache.written(first, False)
    cache.copies.to_write.clear()
    write(cache, 9)
    sources = [source for source, _ in cache.copies.writes.values()]
    assert len(set(sources)) == len(sources) > 1
    cache.written(second, True)
    assert len(cache.table.block_of) == 4


@pytest.mark.parametrize("given_up", [(), (2,), (1,)])
def test_after_a_write_that_failed_no_later_one_counts_whoever_was_forgotten_meanwhile(
    given_up: tuple[int, ...],
) -> None:
    cache = cached(3, 9, 3)
    for _ in range(3):
        cache.evict()
    cache.write_all(9)
    copies = list(cache.copies.writes)
    sources = [source for source, _ in cache.copies.writes.values()]
    for at in given_up:
        cache._lowered.by_kind[cache.table.kinds[sources[at]]].pop(sources[at])
        cache._forget(sources[at])
        cache._release_slot(sources[at])
    cache.copies.to_write.clear()
    cache.moved_down.clear()
    cache.written(copies[0], False)
    assert not cache.copies.of
    for copy in copies[1:]:
        cache.written(copy, True)
    assert not cache.copies.of
    assert len(cache.copies.free) == 9
    assert len(cache.table.block_of) == 3 - len(given_up)
    assert cache.check_integrity([0, 0, 0]) == []


def test_a_small_disk_gets_the_youngest_block_of_host_memory_before_an_older_one_of_the_device() -> None:
    cache = DiskPrefixCache(SIZE, 8, 4, 1)
    younger = insert(cache, 0, [1, 2])
    cache.rest([0])
    cache.evict()
    insert(cache, 1, [3, 4], OUTPUT)
    cache.rest([1])
    cache._now += 100  # an answer ages faster
    cache.write_all(9)
    assert list(cache.copies.of) == [younger]


def test_blocks_of_host_memory_that_have_copies_make_room_for_all_of_the_device() -> None:
    cache = cached(4, 9, 4)
    for _ in range(4):
        cache.evict()
    cache.write_all(9)
    end_writes(cache)
    for block in (0, 1):
        insert(cache, block, [50 + block, 0])
    cache.rest([0, 1])
    cache.write_all(9)
    assert len(cache.copies.writes) == 2
    assert len(cache.table.block_of) == 6


def test_a_copy_is_given_up_for_a_block_that_is_at_most_as_old() -> None:
    cache = DiskPrefixCache(SIZE, 8, SLOTS, 1)
    cache.adopt([(FIRST, disk_block(1, None))])
    cache._now += 10
    age = cache._stored.oldest(cache._now)[0]
    assert not cache._make_copy(age + 0.1)
    assert cache._make_copy(age)
    assert len(cache.table.block_of) == 0


@pytest.mark.parametrize("num_slots", range(1, 9))
def test_reads_and_what_waits_after_them_take_half_of_host_memory_and_one_slot_at_least(num_slots: int) -> None:
    cache = DiskPrefixCache(SIZE, 8, num_slots, COPIES)
    first = cache.first_copy
    cache.adopt((first + at, disk_block(at, None)) for at in range(12))
    most = max(1, num_slots // 2)
    cache.fetch([first])
    cache.fetch([first, first + 1, first + 2, first + 3, first + 4])
    assert list(cache.copies.reads) == [first + at for at in range(min(most, 5))]
    cache.was_read(first, True)
    cache.copies.hold(first)
    cache.fetch([first + at for at in range(1, 12)])
    assert len(cache.copies.reads) == most - 1


def test_a_block_that_just_came_to_host_memory_gives_its_slot_to_a_read() -> None:
    cache = DiskPrefixCache(SIZE, 8, 1, COPIES)
    cache.adopt((9 + at, disk_block(at, None)) for at in range(2))
    cache.keep([9])
    cache.raise_to([0], [9])
    cache.rest([0])
    cache.evict()
    cache.fetch([10])
    assert list(cache.copies.reads) == [10]


def test_a_block_that_is_kept_is_written_as_what_it_is_without_that() -> None:
    cache = cached(4, 9, 1)
    cache.reuse([0], 1)
    kind = cache.table.kinds[0]
    cache.retain([0], 9.0)
    assert cache.table.kinds[0] == KEPT
    assert cache.stored_block(0).kind == kind < KEPT


def test_copies_whose_parents_go_round_in_a_circle_are_left_out_with_all_below_them() -> None:
    cache = adopted([disk_block(3, 2), disk_block(2, 1), disk_block(1, 2), disk_block(4, 3), disk_block(0, None)])
    assert set(cache.copies.of) == {name_of(0)}


def test_copies_age_as_if_they_had_come_to_rest_one_after_the_other() -> None:
    kinds = [OUTPUT, SHORT, SHORT, OUTPUT, LONG, SHORT]
    cache = adopted([disk_block(at, None, kind) for at, kind in enumerate(kinds)])
    assert cache._now == len(kinds)
    ages = {FIRST + at: at * AGING[kind] for at, kind in enumerate(kinds)}
    assert [copy for _, copy in cache._stored.youngest(cache._now)] == sorted(
        ages, key=lambda copy: (ages[copy], -cache.table.kinds[copy])
    )
