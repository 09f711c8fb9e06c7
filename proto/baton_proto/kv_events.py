"""KV cache events: what a worker tells the routers' radix trees, one batch per engine step.

Subject `baton.<namespace>.kv_events.<worker_id>` in the JetStream stream of the namespace. Hashes are defined in
runtime/blocks/block_hash.py; runs of them are little-endian u64 in bytes, so that numpy reads them without a copy.
"""

from collections.abc import Callable, Iterator
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from baton_proto.decoding import Count, Hash, Name, Packed, Rows, versioned

MAJOR = 2

HASH_BYTES = 8
DEFAULT_HASH_SEED = 1337  # of block hashes: Dynamo's
MAX_HASH_SEED = 2**63 - 1
HashSeed = Annotated[int, Meta(ge=0, le=MAX_HASH_SEED)]  # blocks of requests with different seeds have different hashes

# Where a block lies, the nearest first. Invariant: the parent of a block lies as near as the block, or nearer.
DEVICE, HOST, DISK = range(3)
HOMES: Final = ("device", "host", "disk")
Home = Annotated[int, Meta(ge=DEVICE, le=DISK)]


class Stored(Struct, frozen=True, tag="stored", omit_defaults=True):
    """A run of blocks, each the child of the one before; the first is the child of `parent`."""

    parent: Hash | None  # sequence hash; None: the run starts at token 0
    block_hashes: Packed  # u64 LE, one per block
    sequence_hashes: Packed  # u64 LE, one per block
    home: Home = DEVICE

    def parts(self, max_bytes: int) -> Iterator["Stored"]:
        """The same blocks as runs of at most `max_bytes` of hashes, but at least a block. Each one's parent is the last
        block of the one before."""
        step = max(1, max_bytes // (2 * HASH_BYTES)) * HASH_BYTES
        if len(self.sequence_hashes) <= step:
            yield self
            return
        parent = self.parent
        for start in range(0, len(self.sequence_hashes), step):
            sequence_hashes = self.sequence_hashes[start : start + step]
            yield Stored(parent, self.block_hashes[start : start + step], sequence_hashes, self.home)
            parent = int.from_bytes(sequence_hashes[-HASH_BYTES:], "little")


class Removed(Struct, frozen=True, tag="removed"):
    """Evicted blocks. A worker evicts leaves first, so no removed block leaves a stored child behind."""

    sequence_hashes: Packed  # u64 LE


class Moved(Struct, frozen=True, tag="moved"):
    """Blocks that lie in another home now. What comes nearer does so parents first. What moves away does so leaves
    first: behind a block that moves away, nothing stays nearer than it is."""

    sequence_hashes: Packed  # u64 LE
    home: Home


class Cleared(Struct, frozen=True, tag="cleared"):
    """The worker dropped its whole cache."""


KvEvent = Stored | Removed | Moved | Cleared


class KvEventBatch(Struct, frozen=True):
    """`event_id` counts the batches of one incarnation of the worker: 1, 2, 3, ... without holes."""

    version: Count
    worker_id: Name
    incarnation: Count
    event_id: Count
    timestamp_s: float  # Unix time of the publisher, for people; never compared between machines
    events: Annotated[list[KvEvent], Rows]


encode_batch: Callable[[KvEventBatch], bytes] = msgspec.msgpack.Encoder().encode
decode_batch = versioned(KvEventBatch, "kv event", MAJOR)
