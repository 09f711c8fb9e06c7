"""One KV event, as `baton events tail` shows it."""

from typing import Final, NamedTuple, Self, get_args

from baton_proto.kv_events import HASH_BYTES, HOMES, KvEvent, KvEventBatch

KINDS: Final = tuple(str(kind.__struct_config__.tag) for kind in get_args(KvEvent))


class EventLine(NamedTuple):
    time_s: float  # the publisher's clock
    worker_id: str
    incarnation: int
    event_id: int  # of the batch
    kind: str  # one of KINDS
    num_blocks: int
    parent: str | None  # sequence hash, 16 hexadecimal digits
    first: str  # sequence hash of the first block; empty when there is none
    home: str | None = None  # one of HOMES, of stored and moved blocks

    @classmethod
    def of(cls, batch: KvEventBatch, event: KvEvent) -> Self:
        parent: int | None = getattr(event, "parent", None)
        home: int | None = getattr(event, "home", None)
        hashes: bytes = getattr(event, "sequence_hashes", b"")
        return cls(
            batch.timestamp_s,
            batch.worker_id,
            batch.incarnation,
            batch.event_id,
            str(event.__struct_config__.tag),
            len(hashes) // HASH_BYTES,
            None if parent is None else f"{parent:016x}",
            hashes[:HASH_BYTES][::-1].hex(),
            None if home is None else HOMES[home],
        )
