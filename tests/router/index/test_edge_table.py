"""The structure of the tree: blocks entered, split, joined and taken out, with a bounded length and numbers that are
used again."""

import numpy as np
import pytest

from baton_proto.kv_events import HASH_BYTES
from router.index.block_index import NOWHERE
from router.index.edge import Edge
from router.index.edge_table import EVERYONE, MAX_EXTENDED_BYTES, EdgeTable

MOST = MAX_EXTENDED_BYTES // HASH_BYTES


def run(*values: int) -> bytes:
    return np.array(values, dtype="<u8").tobytes()


def span(first: int, count: int) -> bytes:
    return run(*range(first, first + count))


def put(table: EdgeTable, edge: Edge, offset: int, holder: int, first: int, count: int) -> Edge:
    """Enters and attaches `count` blocks; a block's hash is 1,000,000 less than its sequence hash."""
    blocks, sequences = span(first, count), span(1_000_000 + first, count)
    number = table.enter(edge, offset, holder, sequences)
    assert number != NOWHERE
    table.attach(edge, offset, holder, blocks, sequences, number)
    held = table.holding(1_000_000 + first)
    assert held is not None
    return held


def places(table: EdgeTable, first: int, count: int) -> list[Edge | None]:
    return [table.holding(1_000_000 + first + i) for i in range(count)]


def test_a_new_table_has_a_root_that_everyone_covers_and_nothing_else() -> None:
    table = EdgeTable()
    root = table.root
    assert (root.number, root.parent, root.blocks, root.sequences, root.full) == (NOWHERE, None, b"", b"", EVERYONE)
    assert (table.num_blocks, table.num_edges, table.holding(5)) == (0, 0, None)


def test_blocks_at_the_end_of_what_their_worker_alone_holds_make_its_edge_longer() -> None:
    table = EdgeTable()
    edge = put(table, table.root, 0, 1, 10, 3)
    assert put(table, edge, 3 * HASH_BYTES, 1, 13, 2) is edge
    assert (edge.blocks, edge.sequences) == (span(10, 5), span(1_000_010, 5))
    assert (table.num_edges, table.num_blocks, places(table, 10, 5)) == (1, 5, [edge] * 5)


@pytest.mark.parametrize(("full", "has_child"), [(3, False), (1, True), (2, False)])
def test_blocks_behind_an_edge_that_others_cover_or_that_has_children_are_an_edge_of_their_own(
    full: int, has_child: bool
) -> None:
    table = EdgeTable()
    edge = put(table, table.root, 0, full, 10, 3)
    if has_child:
        put(table, edge, 3 * HASH_BYTES, 2, 50, 1)
    child = put(table, edge, 3 * HASH_BYTES, 1, 13, 2)
    assert child is not edge
    assert (child.parent, child.full, child.blocks, child.sequences) == (edge, 1, span(13, 2), span(1_000_013, 2))
    assert edge.blocks == span(10, 3)


def test_hashes_that_are_known_change_nothing_and_cost_no_number() -> None:
    table = EdgeTable()
    edge = put(table, table.root, 0, 1, 10, 3)
    for offset, where in ((3 * HASH_BYTES, edge), (0, table.root)):
        assert table.enter(where, offset, 1, run(2_000_000, 1_000_011)) == NOWHERE
        assert (table.num_edges, table.num_blocks, table.holding(2_000_000)) == (1, 3, None)
    other = put(table, table.root, 0, 1, 30, 1)
    assert (table.num_edges, sorted([edge.number, other.number])) == (2, [1, 2])


def test_no_edge_is_made_longer_once_it_has_its_full_length() -> None:
    table = EdgeTable()
    edge = put(table, table.root, 0, 1, 10, MOST - 1)
    assert put(table, edge, len(edge.blocks), 1, 10 + MOST - 1, 1) is edge
    assert len(edge.blocks) == MAX_EXTENDED_BYTES
    child = put(table, edge, len(edge.blocks), 1, 10 + MOST, 1)
    assert child.parent is edge
    table.join(edge)
    assert table.num_edges == 2, "nor is it joined with the one behind it"


@pytest.mark.parametrize(("kept", "count"), [(1, 5), (4, 5), (2, 4)])
def test_a_branch_splits_an_edge_and_every_block_is_found_in_its_part(kept: int, count: int) -> None:
    table = EdgeTable()
    edge = put(table, table.root, 0, 1, 10, count)
    below = put(table, edge, count * HASH_BYTES, 2, 90, 1)
    edge.full = 0b101
    for bit, covered in ((1, kept), (3, kept + 1), (4, kept - 1)):
        edge.cover(bit, min(covered, count - 1) * HASH_BYTES)
    before = {bit: edge.covered(bit) for bit in range(5)}
    branch = put(table, edge, kept * HASH_BYTES, 4, 50, 2)
    rest = below.parent
    assert rest is not None
    assert (edge.blocks, edge.sequences) == (span(10, kept), span(1_000_010, kept))
    assert (rest.blocks, rest.sequences) == (span(10 + kept, count - kept), span(1_000_010 + kept, count - kept))
    assert edge.children == {run(10 + kept): rest, run(50): branch}
    assert rest.children == {run(90): below}
    assert places(table, 10, count) == [edge] * kept + [rest] * (count - kept)
    assert {bit: edge.covered(bit) + rest.covered(bit) for bit in range(5)} == before
    assert all(rest.covered(bit) == 0 or edge.covered(bit) == len(edge.blocks) for bit in range(5))
    assert (table.num_edges, table.num_blocks) == (4, count + 3)


@pytest.mark.parametrize(("first", "second"), [(1, 4), (4, 1), (2, 2)])
def test_an_edge_is_joined_with_its_only_child_when_the_same_workers_cover_both(first: int, second: int) -> None:
    table = EdgeTable()
    edge = put(table, table.root, 0, 1, 10, first)
    child = put(table, edge, first * HASH_BYTES, 2, 10 + first, second)
    leaf = put(table, child, second * HASH_BYTES, 4, 90, 1)
    table.join(edge)
    assert table.num_edges == 3, "workers differ"
    edge.full = child.full = 3
    table.join(edge)
    assert (edge.blocks, edge.sequences) == (span(10, first + second), span(1_000_010, first + second))
    assert places(table, 10, first + second) == [edge] * (first + second)
    assert (edge.children, leaf.parent, child.number) == ({run(90): leaf}, edge, NOWHERE)
    assert (table.num_edges, table.num_blocks) == (2, first + second + 1)


def test_edges_are_joined_up_to_the_full_length_and_one_after_another() -> None:
    table = EdgeTable()
    edge = put(table, table.root, 0, 1, 10, MOST - 2)
    chain = [edge]
    for first in (MOST + 8, MOST + 9, MOST + 10):
        chain.append(put(table, chain[-1], len(chain[-1].blocks), 2, first, 1))
        chain[-1].full = 4  # of another worker, so that the next is an edge of its own
    for link in chain:
        link.full = 1
    table.join(edge)
    assert (len(edge.blocks), table.num_edges) == (MAX_EXTENDED_BYTES, 2)
    assert places(table, 10, MOST + 1) == [edge] * MOST + [chain[-1]]


def test_an_edge_with_two_children_the_root_and_what_is_gone_are_joined_with_nothing() -> None:
    table = EdgeTable()
    edge = put(table, table.root, 0, 1, 10, 2)
    table.root.full = 1
    table.join(table.root)
    table.join(None)
    assert edge.parent is table.root
    for first in (20, 30):
        put(table, edge, 2 * HASH_BYTES, 2, first, 1).full = 1
    table.join(edge)
    assert table.num_edges == 3


def test_what_nobody_covers_is_taken_out_and_the_rest_covered_by_those_that_reach_its_end() -> None:
    table = EdgeTable()
    edge = put(table, table.root, 0, 1, 10, 5)
    edge.cover(2, 3 * HASH_BYTES)
    edge.cover(4, 3 * HASH_BYTES)
    edge.cover(3, 2 * HASH_BYTES)
    edge.uncover(0, 0)
    table.tidy([edge])
    assert (edge.blocks, edge.sequences) == (span(10, 3), span(1_000_010, 3))
    assert (edge.full, edge.partial) == (0b10100, {3: 2 * HASH_BYTES})
    assert places(table, 10, 5) == [edge] * 3 + [None] * 2
    for bit in (2, 4):
        edge.uncover(bit, 0)
    table.tidy([edge])
    assert (edge.full, edge.partial, edge.blocks) == (0b1000, None, span(10, 2))
    edge.uncover(3, 0)
    table.tidy([edge])
    assert (edge.number, table.root.children, table.num_edges, table.num_blocks) == (NOWHERE, None, 0, 0)


def test_a_shortened_edge_keeps_those_that_cover_all_of_what_is_left() -> None:
    """Nobody covered it to the end; the one that covers most covers all of it then, beside others that do not."""
    table = EdgeTable()
    edge = put(table, table.root, 0, 1, 10, 4)
    edge.cover(1, HASH_BYTES)
    edge.uncover(0, 3 * HASH_BYTES)
    table.tidy([edge])
    assert (edge.full, edge.partial, edge.blocks) == (1, {1: HASH_BYTES}, span(10, 3))


def test_an_edge_is_joined_again_when_the_branch_behind_it_is_gone() -> None:
    table = EdgeTable()
    edge = put(table, table.root, 0, 1, 10, 4)
    branch = put(table, edge, 2 * HASH_BYTES, 2, 50, 1)
    assert table.num_edges == 3
    branch.uncover(1, 0)
    table.tidy([branch])
    assert (edge.blocks, edge.children, table.num_edges, table.num_blocks) == (span(10, 4), None, 1, 4)
    assert places(table, 10, 4) == [edge] * 4


def test_an_edge_is_joined_with_its_child_when_a_worker_that_covered_no_more_is_gone() -> None:
    table = EdgeTable()
    edge = put(table, table.root, 0, 1, 10, 4)
    branch = put(table, edge, 2 * HASH_BYTES, 2, 50, 1)
    edge.cover(1, 2 * HASH_BYTES)
    branch.uncover(1, 0)
    table.tidy([branch])
    assert (table.num_edges, edge.full) == (2, 3), "the branch is gone, its worker still covers what was before it"
    edge.uncover(1, 0)
    table.tidy([edge])
    assert (edge.blocks, edge.children, edge.full, table.num_edges) == (span(10, 4), None, 1, 1)


def test_numbers_of_edges_that_are_gone_are_used_again() -> None:
    table = EdgeTable()
    edges = [put(table, table.root, 0, 1, first, 1) for first in (10, 20, 30)]
    assert sorted(edge.number for edge in edges) == [1, 2, 3]
    numbers = [edges[0].number, edges[2].number]
    for edge in (edges[0], edges[2]):
        edge.uncover(0, 0)
    table.tidy([edges[0], edges[2]])
    later = [put(table, table.root, 0, 1, first, 1) for first in (40, 50, 60)]
    assert sorted(edge.number for edge in later) == sorted([*numbers, 4])
    assert (table.num_edges, len({edge.number for edge in (edges[1], *later)})) == (4, 4)
