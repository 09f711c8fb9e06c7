"""What the bits of edges' masks mean: whose they are, for which home, and what that makes of an edge's coverage."""

import numpy as np
import pytest

from baton_proto.kv_events import DEVICE, DISK, HASH_BYTES, HOST
from router.index.edge import Edge
from router.index.edge_table import EdgeTable
from router.index.holders import UNKNOWN, Held, Holders, bits
from router.index.roster import NOBODY
from runtime.discovery.worker_key import WorkerKey

A: WorkerKey = ("a", 1)
B: WorkerKey = ("b", 1)
C: WorkerKey = ("c", 1)
BLOCKS = 6


@pytest.fixture
def holders() -> Holders:
    found = Holders()
    for worker in (A, B, C):
        found.add(worker)
    return found


@pytest.fixture
def root() -> Edge:
    return EdgeTable().root


def edge_under(root: Edge, first: int = 1) -> Edge:
    """An edge of BLOCKS blocks that nobody covers."""
    hashes = np.arange(first, first + BLOCKS, dtype="<u8").tobytes()
    return Edge(1, root, hashes, hashes, 0)


def cover(holders: Holders, edge: Edge, worker: WorkerKey, *blocks: int) -> None:
    """Up to the first number of blocks on the device, up to the next one at most in host memory, and so on."""
    for bit, count in zip(holders.bits(worker), blocks, strict=True):
        holders.cover(edge, (bit,), count * HASH_BYTES)


def test_every_bit_has_its_workers_name_and_those_for_nearer_homes_are_known_as_such(
    holders: Holders, root: Edge
) -> None:
    of_a, of_c = holders.distinguish(A, DISK, root), holders.distinguish(C, HOST, root)
    assert (len(of_a), len(holders.bits(B)), len(of_c)) == (3, 1, 2)
    for worker, numbers in ((A, of_a), (B, holders.bits(B)), (C, of_c)):
        assert {holders.names[bit] for bit in numbers} == {worker}
    assert holders.nearer == sum(1 << bit for bit in (*of_a[:-1], *of_c[:-1]))
    assert holders.distinguish(A, HOST, root) == of_a
    holders.discard(A)
    assert holders.nearer == 1 << of_c[0]
    assert holders.bits(A) == UNKNOWN


def test_what_a_worker_holds_of_an_edge_is_told_by_home(holders: Holders, root: Edge) -> None:
    edge = edge_under(root)
    holders.distinguish(A, DISK, root)
    cover(holders, edge, A, 1, 3, BLOCKS)
    cover(holders, edge, B, 4)
    assert holders.owners(edge) == {A: Held(BLOCKS, 2, 3), B: Held(4)}
    holders.distinguish(C, HOST, root)
    assert holders.owners(edge) == {A: Held(BLOCKS, 2, 3), B: Held(4)}, "C holds nothing of it"
    cover(holders, edge, C, 2, 5)
    assert holders.owners(edge) == {A: Held(BLOCKS, 2, 3), B: Held(4), C: Held(5, 3)}


def test_a_worker_that_tells_of_a_lower_home_held_all_before_on_the_device(holders: Holders, root: Edge) -> None:
    edge = edge_under(root)
    below = edge_under(edge, first=100)
    cover(holders, edge, A, BLOCKS)
    cover(holders, below, A, 2)
    holders.distinguish(A, DISK, root)
    assert (holders.owners(edge), holders.owners(below)) == ({A: Held(BLOCKS, 0, 0)}, {A: Held(2, 0, 0)})
    assert holders.held(A) == Held(BLOCKS + 2, 0, 0)
    assert (holders.held(B), holders.held(("stranger", 1))) == (Held(0), Held(0))


def test_the_table_of_bits_has_one_for_each_home_and_nobody_for_those_without(holders: Holders, root: Edge) -> None:
    assert Holders().numbers_at().tolist() == [[NOBODY]] * 3
    of_a, of_c = holders.distinguish(A, DISK, root), holders.distinguish(C, HOST, root)
    workers = (A, B, C, ("stranger", 1))
    at = holders.numbers_at()[:, holders.numbers(workers)]
    (of_b,) = holders.bits(B)
    assert at[DEVICE].tolist() == [of_a[0], of_b, of_c[0], NOBODY]
    assert at[HOST].tolist() == [of_a[1], of_b, of_c[1], NOBODY]
    assert at[DISK].tolist() == [of_a[2], of_b, of_c[1], NOBODY]
    holders.discard(C)
    holders.add(("d", 1))
    assert holders.numbers_at()[DISK, holders.numbers((C, ("d", 1)))].tolist() == [NOBODY, *holders.bits(("d", 1))]


@pytest.mark.parametrize("mask", [0, 1, 0b100, 0x80, 0x100, 0x1FF, 1 << 300 | 1 << 64 | 5])
def test_the_bits_of_a_mask_come_lowest_first_up_to_the_highest_that_is_set(mask: int) -> None:
    found = bits(mask)
    assert found.tolist() == [bool(mask >> bit & 1) for bit in range(mask.bit_length())]
    assert found.dtype == np.bool_
    with pytest.raises(ValueError, match="read-only"):
        found[:] = True
