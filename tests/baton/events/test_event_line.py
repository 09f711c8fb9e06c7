"""A line for each kind of event."""

from baton.cli.events.tail import EventType
from baton.events.event_line import KINDS, EventLine
from baton_proto.kv_events import HOST, MAJOR, Cleared, KvEventBatch, Moved, Removed, Stored


def test_each_kind_of_event_becomes_a_line() -> None:
    hashes = (0xAB).to_bytes(8, "little") * 2
    events = [Stored(0xC, hashes, hashes), Removed(hashes), Moved(hashes, HOST), Cleared()]
    batch = KvEventBatch(MAJOR, "w", 1, 7, 1.5, events)
    lines = [EventLine.of(batch, event)[4:] for event in batch.events]
    first = f"{0xAB:016x}"
    assert lines == [
        ("stored", 2, f"{0xC:016x}", first, "device"),
        ("removed", 2, None, first, None),
        ("moved", 2, None, first, "host"),
        ("cleared", 0, None, "", None),
    ]


def test_tail_filters_by_every_kind_of_event() -> None:
    assert tuple(EventType) == KINDS
