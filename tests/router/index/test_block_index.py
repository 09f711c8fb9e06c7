"""The hash table behind the radix tree against a dict."""

import numpy as np
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from router.index.block_index import MAX_LOAD, MIN_SLOTS, MOVED_PER_KEY, NOWHERE, BlockIndex
from router.index.hash_table import SPREAD


def held(index: BlockIndex, keys: NDArray[np.uint64]) -> list[int]:
    return [index.get(key) for key in keys.tolist()]


def test_it_agrees_with_a_dict_while_it_grows_and_shrinks() -> None:
    rng = np.random.default_rng(1)
    index = BlockIndex()
    expected: dict[int, int] = {}
    rebuilding = 0
    for edge in range(1, 400):
        keys = np.unique(rng.integers(2, 2**64, size=rng.integers(1, 300), dtype=np.uint64))
        assert index.insert(keys, edge)
        expected.update(dict.fromkeys(keys.tolist(), edge))
        rebuilding += index._rebuilding
        if edge % 7 == 0:
            some = rng.choice(np.array(list(expected), dtype=np.uint64), 200, replace=False)
            index.repoint(some, edge + 1000)
            expected.update(dict.fromkeys(some.tolist(), edge + 1000))
        if edge % 5 == 0:
            gone = rng.choice(np.array(list(expected), dtype=np.uint64), 100, replace=False)
            index.remove(gone)
            for key in gone.tolist():
                del expected[key]
            assert not any(held(index, gone))
    all_keys = np.array(list(expected), dtype=np.uint64)
    assert len(index) == len(expected)
    assert rebuilding > 20, "changes while it grows are part of the test"
    assert held(index, all_keys) == list(expected.values())
    assert index.get(12345) == NOWHERE
    assert index.nbytes / len(index) < 50
    for part in np.array_split(all_keys, 1000):
        index.remove(part)
    assert len(index) == 0
    assert not any(held(index, all_keys))
    for start in range(2, 40_000, 100):  # it halves again and again
        some = np.arange(start, start + 100, dtype=np.uint64)
        index.insert(some, 1)
        index.remove(some)
    assert (len(index._keys), len(index._old_keys)) == (MIN_SLOTS, 1)


UNSPREAD = pow(int(SPREAD), -1, 2**64)

# Homes at the end of the table, where searches go on at its start, and in its middle; many share one.
crowded = st.builds(
    lambda home, low: (home << 32 | low) * UNSPREAD % 2**64,
    st.sampled_from([2**32 - 1, 2**32 - 2**22, 2**31, 0]),
    st.integers(2, 40),
)


@given(st.lists(st.tuples(st.booleans(), st.lists(crowded, min_size=1, max_size=30)), max_size=40))
@settings(deadline=None)
def test_hashes_that_share_a_home_find_room_and_gaps_are_closed(steps: list[tuple[bool, list[int]]]) -> None:
    index = BlockIndex()
    expected: dict[int, int] = {}
    for edge, (adds, numbers) in enumerate(steps, start=1):
        new = not expected.keys() & set(numbers) and len(set(numbers)) == len(numbers)
        if adds:
            assert index.insert(np.array(numbers, dtype=np.uint64), edge) == new
            if new:
                expected.update(dict.fromkeys(numbers, edge))
        else:
            known = np.array([number for number in set(numbers) if expected.pop(number, None)], dtype=np.uint64)
            index.remove(known)
            assert not any(held(index, known))
        assert len(index) == len(expected)
        assert held(index, np.array(list(expected), dtype=np.uint64)) == list(expected.values())


def test_hashes_that_differ_in_few_bits_do_not_crowd_the_table() -> None:
    """Keys from elsewhere may have zeros at either end."""
    for shift in (0, 20, 44):
        index = BlockIndex()
        keys = np.arange(2, 20_002, dtype=np.uint64) << np.uint64(shift)
        assert index.insert(keys, 7)
        used = np.flatnonzero(index._keys)
        runs = np.split(used, np.flatnonzero(np.diff(used) > 1) + 1)
        assert max(map(len, runs)) < 200


def test_what_names_no_block_is_refused() -> None:
    index = BlockIndex()
    for bad in (0, 1):
        assert not index.insert(np.array([5, bad, 6], dtype=np.uint64), 1)
        assert (len(index), index.get(5), index.get(6), index.get(bad)) == (0, NOWHERE, NOWHERE, NOWHERE)


def test_an_old_table_does_not_become_full_while_it_is_left() -> None:
    """Even when all that is new belongs to its end, which moves last."""
    rng = np.random.default_rng(3)
    index = BlockIndex()
    while not index._rebuilding or len(index) < 50_000:
        index.insert(rng.integers(2, 2**64, size=1000, dtype=np.uint64), 1)
    end = np.arange(2**64 - 200_000, 2**64 - 1, dtype=np.uint64) * np.uint64(UNSPREAD)
    before, added = len(index), 0
    while index._rebuilding:
        assert index.insert(end[added : added + 100], 2)
        added += 100
        assert np.count_nonzero(index._old_keys == 0) > 0.2 * len(index._old_keys) or not index._rebuilding
    assert len(index) == before + added > before
    assert set(held(index, end[:added])) == {2}


def test_no_single_change_moves_the_whole_table() -> None:
    rng = np.random.default_rng(2)
    index = BlockIndex()
    index.insert(rng.integers(2, 2**64, size=100_000, dtype=np.uint64), 1)
    while not index._rebuilding:
        index.insert(rng.integers(2, 2**64, size=100, dtype=np.uint64), 2)
    left = len(index._old_keys)
    moved = index._moved
    assert moved <= MOVED_PER_KEY * 100
    changes = 0
    while index._rebuilding:
        index.insert(rng.integers(2, 2**64, size=100, dtype=np.uint64), 3)
        changes += 1
        assert len(index) < MAX_LOAD * len(index._keys), "it ends before the new table is full"
    assert changes >= (left - moved) // (MOVED_PER_KEY * 100)
