"""One KV event, as `baton events tail` shows it."""

from typing import NamedTuple, Self

from baton_proto.kv_events import HASH_BYTES, Cleared, KvEvent, KvEventBatch, Removed, Stored


class EventLine(NamedTuple):
    time_s: float  # the publisher's clock
    worker_id: str
    incarnation: int
    event_id: int  # of the batch
    kind: str  # "stored" | "removed" | "cleared"
    num_blocks: int
    parent: str | None  # sequence hash, 16 hexadecimal digits
    first: str  # sequence hash of the first block; empty when there is none

    @classmethod
    def of(cls, batch: KvEventBatch, event: KvEvent) -> Self:
        match event:
            case Stored(parent, _, hashes):
                kind, above = "stored", f"{parent:016x}" if parent is not None else None
            case Removed(hashes):
                kind, above = "removed", None
            case Cleared():
                kind, above, hashes = "cleared", None, b""
        return cls(
            batch.timestamp_s,
            batch.worker_id,
            batch.incarnation,
            batch.event_id,
            kind,
            len(hashes) // HASH_BYTES,
            above,
            hashes[:HASH_BYTES][::-1].hex(),
        )
