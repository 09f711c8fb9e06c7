"""Runs of blocks under one another, how much of an edge each worker covers, and what two runs share."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from baton_proto.kv_events import HASH_BYTES
from router.index.edge import Edge, Run, common_bytes, common_end, find_hash


def run(*values: int) -> bytes:
    return np.array(values, dtype="<u8").tobytes()


def edge(full: int = 0) -> Edge:
    """Four blocks."""
    return Edge(7, None, run(1, 2, 3, 4), run(11, 12, 13, 14), full)


def test_a_run_stands_under_its_parent_by_its_first_block_until_it_is_detached() -> None:
    root = Run(None, b"")
    assert (root.parent, root.blocks, root.children) == (None, b"", None)
    first, second = Run(root, run(1, 2)), Run(root, run(3))
    assert root.children == {run(1): first, run(3): second}
    assert first.parent is root
    first.detach()
    assert root.children == {run(3): second}
    second.detach()
    assert root.children is None, "None when there are none"


def test_a_step_goes_to_the_child_that_continues_the_query_and_says_how_much_they_share() -> None:
    root = Run(None, b"")
    assert root.step(run(1), 0) is None
    child = Run(root, run(1, 2, 3))
    assert root.step(run(9), 0) is None
    for before in ((), (8,), (1, 2, 3)):
        query, position = run(*before, 1, 2, 3, 4), HASH_BYTES * len(before)
        assert root.step(query, position) == (child, 3 * HASH_BYTES)
        assert root.step(query[: position + 2 * HASH_BYTES], position) == (child, 2 * HASH_BYTES)
        assert root.step(run(*before, 1, 2, 5), position) == (child, 2 * HASH_BYTES)
        assert root.step(query, len(query)) is None


workers = st.integers(0, 3)
lengths = st.integers(0, 4).map(lambda blocks: blocks * HASH_BYTES)


@given(st.lists(st.tuples(st.sampled_from(["cover", "uncover"]), workers, lengths), max_size=12), st.integers(0, 15))
def test_coverage_rises_and_falls_as_a_table_of_lengths_does(steps: list[tuple[str, int, int]], full: int) -> None:
    subject = edge(full)
    whole = len(subject.blocks)
    table = {bit: whole if full >> bit & 1 else 0 for bit in range(4)}
    for what, bit, length in steps:
        before = table[bit]
        if what == "cover":
            table[bit] = max(before, length)
            assert subject.cover(bit, length) == table[bit] - before
        else:
            table[bit] = min(before, length)
            assert subject.uncover(bit, length) == before - table[bit]
        assert {bit: subject.covered(bit) for bit in range(4)} == table
        assert subject.full == sum(1 << bit for bit, covered in table.items() if covered == whole)
        partial = {bit: covered for bit, covered in table.items() if 0 < covered < whole}
        assert subject.partial == (partial or None), "only what is neither all nor nothing"


def test_a_hash_is_not_found_across_two_others_however_often_it_appears_there() -> None:
    wanted = b"\x01" * HASH_BYTES
    for shift in range(1, HASH_BYTES):
        crossing = b"\xff" * shift + wanted + b"\xff" * (HASH_BYTES - shift)
        assert find_hash(crossing * 2 + wanted + crossing + wanted, wanted) == 4 * HASH_BYTES
        # Each of its bytes begins another one that crosses two hashes.
        assert find_hash(b"\xff" * shift + b"\x01" * (2 * HASH_BYTES - shift), wanted) == HASH_BYTES
    with pytest.raises(ValueError, match="not found"):
        find_hash(b"\xff" * 4 + wanted + b"\xff" * 4, wanted)


# Few values, some of which differ only in one byte: runs share some blocks and parts of blocks.
hashes = st.lists(st.sampled_from([1, 2, 1 << 56 | 1, 1 << 32]), max_size=6)


@given(hashes, hashes, hashes, st.data())
def test_what_two_runs_share_is_counted_hash_by_hash(
    head: list[int], a: list[int], b: list[int], data: st.DataObject
) -> None:
    """Beginnings are compared from an offset of each run on, ends up to an offset of each."""
    left, right = [*a, *head], [*b, *head]
    a_from, b_from = data.draw(st.integers(0, len(left))), data.draw(st.integers(0, len(right)))
    offsets = HASH_BYTES * a_from, HASH_BYTES * b_from

    def equal(one: list[int], other: list[int]) -> int:
        pairs = list(zip(one, other, strict=False))
        return HASH_BYTES * next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))

    beginning = common_bytes(run(*left), offsets[0], run(*right), offsets[1])
    assert beginning == equal(left[a_from:], right[b_from:])
    end = common_end(run(*left), offsets[0], run(*right), offsets[1])
    assert end == equal(left[:a_from][::-1], right[:b_from][::-1])
    assert isinstance(beginning, int)
    assert isinstance(end, int)
