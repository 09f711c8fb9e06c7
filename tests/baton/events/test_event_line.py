"""A line for each kind of event."""

from baton.cli.events.tail import EventType
from baton.events.event_line import KINDS, EventLine
from baton_proto.kv_events import MAJOR, Cleared, KvEventBatch, Removed, Stored


def test_each_kind_of_event_becomes_a_line() -> None:
    hashes = (0xAB).to_bytes(8, "little") * 2
    batch = KvEventBatch(MAJOR, "w", 1, 7, 1.5, [Stored(0xC, hashes, hashes), Removed(hashes), Cleared()])
    lines = [EventLine.of(batch, event)[4:] for event in batch.events]
    first = f"{0xAB:016x}"
    assert lines == [("stored", 2, f"{0xC:016x}", first), ("removed", 2, None, first), ("cleared", 0, None, "")]


def test_tail_filters_by_every_kind_of_event() -> None:
    assert tuple(EventType) == KINDS
