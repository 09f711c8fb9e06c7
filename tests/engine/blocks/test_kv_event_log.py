"""Which changes of the prefix cache become one event, and that merging them changes nothing."""

from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given

from baton_proto.kv_events import DEVICE, DISK, HOST, Stored
from engine.blocks.kv_event_log import KvEventLog
from tests.engine.kv_oracle import EventReplica, u64


def told(log: KvEventLog) -> list[tuple[int | None, list[int]]]:
    """(home, sequence hashes); no home: removed"""
    return [(getattr(event, "home", None), u64(getattr(event, "sequence_hashes", b""))) for event in log.take()]


def test_each_block_that_pushes_others_down_adds_to_the_same_three_events() -> None:
    log = KvEventLog()
    for block in range(1, 4):
        log.removed(block)
        log.moved(block + 10, DISK)
        log.moved(block + 20, HOST)
    assert told(log) == [(HOST, [21, 22, 23]), (DISK, [11, 12, 13]), (None, [1, 2, 3])]


def test_a_block_that_moves_twice_is_told_twice_in_order() -> None:
    log = KvEventLog()
    for home in (HOST, DISK, HOST, DEVICE, HOST):
        log.moved(1, home)
    log.removed(1)
    assert [home for home, _ in told(log)] == [HOST, DISK, HOST, DEVICE, HOST, None]


def test_runs_are_stored_in_one_home() -> None:
    log = KvEventLog()
    log.stored(None, [1], [11], DEVICE)
    log.stored(11, [2], [12], HOST)
    log.stored(12, [3], [13], HOST)
    log.moved(12, DEVICE)
    log.stored(13, [4], [14], HOST)
    runs = [event for event in log.take() if isinstance(event, Stored)]
    assert [(run.parent, run.home, u64(run.sequence_hashes)) for run in runs] == [
        (None, DEVICE, [11]),
        (11, HOST, [12, 13]),
        (13, HOST, [14]),
    ]


@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from([DEVICE, HOST, DISK, None])), max_size=60))
def test_what_is_told_in_few_events_leaves_the_same_blocks_in_the_same_homes(
    wanted: list[tuple[int, int | None]],
) -> None:
    """Seven blocks in a binary tree. Whatever would break the order of homes is left out."""
    log, homes = KvEventLog(), dict[int, int]()
    for block, home in wanted:
        above, below = (block - 1) // 2, [child for child in (2 * block + 1, 2 * block + 2) if child in homes]
        if home is None:
            if block in homes and not below:
                del homes[block]
                log.removed(block)
        elif (block and homes.get(above, DISK + 1) > home) or any(homes[child] < home for child in below):
            continue
        elif block not in homes:
            log.stored(above if block else None, [block], [block], home)
            homes[block] = home
        elif homes[block] != home:
            log.moved(block, home)
            homes[block] = home
    events = log.take()
    kinds = [None if isinstance(event, Stored) else (type(event), getattr(event, "home", None)) for event in events]
    assert all(a is None or a != b for a, b in pairwise(kinds)), "two events that could be one"
    replica = EventReplica()
    replica.apply(events)
    assert replica.homes == homes
