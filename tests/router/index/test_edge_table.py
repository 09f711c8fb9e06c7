"""The structure of the tree: blocks entered, split, joined and taken out, with a bounded length and numbers that are
used again."""

import numpy as np

from baton_proto.kv_events import HASH_BYTES
from router.index.block_index import NOWHERE
from router.index.edge import Edge
from router.index.edge_table import MAX_EXTENDED_BYTES, EdgeTable

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
