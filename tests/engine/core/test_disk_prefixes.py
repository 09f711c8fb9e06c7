"""Copies that an earlier process left: which of them are known again, as what, and in which order they are given up."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from baton_proto.kv_events import DISK, Stored
from engine.core.disk_copies import DiskBlock
from engine.core.disk_prefixes import DiskPrefixCache
from engine.core.resting import KEPT, SHORT
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
        assert cache._disk_block(copy)._replace(kind=0) == block._replace(kind=0)
        below = [other for other in expected if name in lineage(other, parents)]
        assert cache._kinds[copy] == min(KEPT - 1, max(youngest[other][1].kind for other in below))


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
        given_up.append(cache._sequence_hashes[copy])
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
    assert adopted(blocks).match(wanted, 0, 2) == [FIRST + 1, FIRST]
    assert adopted([blocks[0], blocks[1]._replace(seed=seeds + 1)]).match(wanted, 0, 2) == []
    assert adopted([blocks[0]._replace(tokens=tokens[0]), blocks[1]]).match(wanted, 0, 2) == [FIRST + 1]


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
    assert len(cache) == 2, "the blocks of the device"
    assert cache.check_integrity([1, 1]) == []


def test_a_block_that_leaves_memory_moves_to_its_copy_and_without_one_it_is_forgotten() -> None:
    cache = adopted([disk_block(1, None)])
    on_the_device(cache)
    cache.rest([1, 0])
    assert cache.evict() == 1
    cache._give_up_slot(SHORT)
    assert len(cache) == 1
    assert cache.evict() == 0
    assert cache.content(FIRST) is None
    (kind,) = [kind for kind, queue in enumerate(cache._lowered.by_kind) if queue]
    cache._give_up_slot(kind)
    assert cache.copies.of == {name_of(1): FIRST}
    assert cache.holds(FIRST)
    slot = cache.content(FIRST)
    assert slot in range(8, FIRST), "until another block takes the slot, the content is in memory, too"
    assert cache.moved_down == {slot: 0}
    cache.moved_down.clear()
    assert cache.check_integrity([0, 0]) == []
