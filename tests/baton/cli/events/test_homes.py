"""Where blocks lie, as the commands show it."""

from baton.cli.events.tail import _PeopleFormat
from baton.cli.events.tree import _heading, _owners
from baton.events.event_line import EventLine
from baton_proto.generated import inference_pb2 as pb
from baton_proto.kv_events import DEVICE, DISK, HOST, MAJOR, KvEvent, KvEventBatch, Moved, Stored

HASH = bytes(8)
OWNERS = [
    pb.TreeOwner(worker_id="a", blocks=9),
    pb.TreeOwner(worker_id="b", blocks=9, host_blocks=3, disk_blocks=1),
    pb.TreeOwner(worker_id="c", blocks=5, disk_blocks=5),
]


def line(event: KvEvent) -> str:
    return _PeopleFormat().line(EventLine.of(KvEventBatch(MAJOR, "w", 1, 7, 1.5, [event]), event))


def test_the_tree_tells_what_lies_in_lower_homes() -> None:
    assert _owners(OWNERS, 9) == "a, b (3 in host memory, 1 on disk), c (5, 5 on disk)"
    heading = _heading(pb.TreeSummary(router_id="r", block_size=16, blocks=9, runs=1, workers=OWNERS))
    assert heading.endswith("held by a 9, b 9 (3 in host memory, 1 on disk), c 5 (5 on disk)")


def test_tail_tells_where_blocks_are_stored_and_where_they_move() -> None:
    assert line(Stored(None, HASH, HASH, DEVICE)).endswith("at the start")
    assert line(Stored(None, HASH, HASH, DISK)).endswith("at the start  on disk")
    assert line(Moved(HASH, HOST)).endswith("1 block   first 00000000  to host")
    assert line(Moved(HASH, DEVICE)).endswith("first 00000000  to device")
