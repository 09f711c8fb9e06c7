"""A match by levels of workers: as a mapping, as a column, and what it says of the longest prefix."""

from types import MappingProxyType

import numpy as np
import pytest

from baton_proto.kv_events import DISK
from router.index.edge_table import EdgeTable
from router.index.holders import Holders
from router.index.match import Match, column
from runtime.discovery.worker_key import WorkerKey

A: WorkerKey = ("a", 1)
B: WorkerKey = ("b", 1)
C: WorkerKey = ("c", 1)
D: WorkerKey = ("d", 1)
STRANGER: WorkerKey = ("stranger", 1)


@pytest.fixture
def match() -> Match:
    """A and C hold 5 blocks, B holds 3, D none."""
    roster = Holders()
    for worker in (A, B, C, D):
        roster.add(worker)
    return Match([(5, 0b101)], [(3, 1)], roster, b"", 0)


def test_workers_with_nothing_do_not_appear_in_the_mapping_and_are_0_in_a_column(match: Match) -> None:
    assert match.as_dict() == dict(match) == {A: 5, B: 3, C: 5}
    assert (len(match), match[B], match.get(D)) == (3, 3, None)
    assert repr(match) == f"Match({match.as_dict()})"
    asked = (D, C, STRANGER, B, A)
    assert match.column(asked).tolist() == [0, 5, 0, 3, 5]
    assert match.column(asked).dtype == np.int32


def test_of_a_worker_with_lower_homes_the_mapping_has_what_lies_in_any_of_them() -> None:
    holders = Holders()
    holders.add(A)
    on_device, in_host, anywhere = holders.distinguish(A, DISK, EdgeTable().root)
    match = Match([], [(7, anywhere), (5, in_host), (2, on_device)], holders, b"", 0)
    assert match.as_dict() == {A: 7}
    assert match.lower((A, STRANGER)).tolist() == [[3, 0], [2, 0]]
    assert Match([(7, 1 << anywhere), (2, 1 << on_device)], [], holders, b"", 0).as_dict() == {A: 7}


def test_the_last_block_that_matched_ends_where_the_query_left_the_edge() -> None:
    sequences = bytes(range(24))
    assert Match([], [], Holders(), sequences, 16).last_block == sequences[8:16]
    assert Match([], [], Holders(), sequences, 8).last_block == sequences[:8]


def test_a_column_of_any_mapping_is_that_of_a_match(match: Match) -> None:
    asked = (D, C, STRANGER, B, A)
    for held in (match, match.as_dict(), MappingProxyType(match.as_dict())):
        found = column(held, asked)
        assert found.tolist() == [0, 5, 0, 3, 5]
        assert found.dtype == np.int32
