"""The hash table behind the radix tree against a dict."""

import numpy as np

from router.block_index import MIN_BUCKETS, NOWHERE, SLOTS, BlockIndex


def test_it_agrees_with_a_dict_while_it_grows_and_shrinks() -> None:
    rng = np.random.default_rng(1)
    index = BlockIndex()
    expected: dict[int, int] = {}
    for edge in range(1, 400):
        keys = np.unique(rng.integers(1, 2**64, size=rng.integers(1, 300), dtype=np.uint64))
        index.insert(keys, edge)
        expected.update(dict.fromkeys(keys.tolist(), edge))
        if edge % 7 == 0:
            some = rng.choice(np.array(list(expected), dtype=np.uint64), 200, replace=False)
            index.repoint(some, edge + 1000)
            expected.update(dict.fromkeys(some.tolist(), edge + 1000))
        if edge % 5 == 0:
            gone = rng.choice(np.array(list(expected), dtype=np.uint64), 100, replace=False)
            index.remove(gone)
            for key in gone.tolist():
                del expected[key]
            assert not index.get_many(gone).any()
    all_keys = np.array(list(expected), dtype=np.uint64)
    assert len(index) == len(expected)
    assert index._overflow, "buckets that are full are part of the test"
    assert index.get_many(all_keys).tolist() == list(expected.values())
    assert [index.get(key) for key in expected] == list(expected.values())
    assert index.get(12345) == NOWHERE
    assert index.nbytes / len(index) < 35
    index.remove(all_keys)
    assert len(index) == 0
    assert not index._overflow
    for _ in range(20):  # it halves with each removal
        index.insert(all_keys[:1], 1)
        index.remove(all_keys[:1])
    assert index._keys.size == MIN_BUCKETS * SLOTS


def test_hashes_that_share_a_bucket_find_room() -> None:
    index = BlockIndex()
    keys = np.arange(1, 3 * SLOTS, dtype=np.uint64)  # the high bits choose the bucket: all the same one
    index.insert(keys, 7)
    assert index.get_many(keys).tolist() == [7] * len(keys)
    index.remove(keys[::2])
    index.repoint(keys[1::2], 8)
    assert index.get_many(keys).tolist() == [NOWHERE if i % 2 == 0 else 8 for i in range(len(keys))]
    assert len(index) == len(keys) // 2
