"""One transfer on the prefill side: what the engine hands in, in order, and how the transfer ended."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import structs

from baton_proto import transfer as wire
from baton_proto.timeline import MAX_CHUNKS, PushedChunk, micros
from baton_proto.worker import Grant
from kvtransfer.slab.slab import Mark
from kvtransfer.wire.framing import MAX_PAYLOAD_BYTES


@dataclass(frozen=True, slots=True)
class PushResult:
    """How a push ended. `transport` is empty when no connection came about."""

    ok: bool
    reason: str
    transport: str
    kv_blocks: int  # blocks that the decode worker has now; 0 unless ok
    kv_bytes: int  # written, whether committed or not
    seconds: float  # since begin()


@dataclass(slots=True)
class ChunkPush:
    """When the blocks of one prompt chunk went, and how many bytes. Times are on time.monotonic()."""

    start_s: float
    end_s: float
    busy_s: float = 0.0
    kv_bytes: int = 0
    layers: int = 0


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """Our blocks `source` are final in this layer and belong into granted blocks [first, ...)."""

    layer: int
    first: int
    source: Sequence[int]
    ready: Mark | None = None  # when the blocks are computed

    def continues(self, earlier: "LayerBlocks") -> bool:
        """Whether these are the same blocks in the next layer."""
        return self.layer == earlier.layer + 1 and (self.first, self.source) == (earlier.first, earlier.source)


class PushQueue(Protocol):
    """What carries out pushes: a link, or the rank's IdlePushes."""

    def enqueue(self, push: "Push", operation: LayerBlocks | wire.Commit) -> None: ...

    def abort(self, push: "Push", reason: str) -> None: ...


@dataclass(slots=True, eq=False)
class Push:
    """A transfer. The engine thread calls the methods, each of which returns at once; the queue carries them out in
    order. Calls after the end (after a cancel by the decode worker, say) have no effect.

    The fields are the queue's: guarded by its lock, but for those that a comment gives to its thread.
    """

    queue: PushQueue
    grant: Grant
    on_done: Callable[[PushResult], None]
    started_s: float = field(default_factory=time.monotonic)
    deadline_s: float = field(init=False)  # when the step that is waited for must have happened
    operations: deque[LayerBlocks | wire.Commit] = field(default_factory=deque)
    stop: wire.Abort | wire.Drained | None = None  # what the peer is told instead of the remaining operations
    reason: str = ""
    begun: bool = False
    accepted: bool = False
    queued: bool = False  # among the link's pushes that have something to do
    done: bool = False
    kv_bytes: int = 0  # this and `chunks`: the link's thread
    chunks: dict[int, ChunkPush] = field(default_factory=dict)  # by the first granted block; at most MAX_CHUNKS

    def __post_init__(self) -> None:
        self.deadline_s = self.started_s + self.grant.ttl_s

    @property
    def transfer_id(self) -> str:
        return self.grant.transfer_id

    def layer_ready(self, layer: int, first: int, source_blocks: Sequence[int], ready: Mark | None = None) -> None:
        """From `ready` until on_done, `source_blocks[i]` holds what belongs into `grant.block_ids[first + i]`.

        Invariant: at `ready`, all blocks handed in before are computed, too. The unused tail of a partial last block is
        shipped as it is; the caller has zeroed it where stale values could hurt.
        """
        assert 0 <= first <= first + len(source_blocks) <= len(self.grant.block_ids)
        if source_blocks:
            self.queue.enqueue(self, LayerBlocks(layer, first, tuple(source_blocks), ready))

    def commit(self, payload: bytes) -> None:
        """Ends the push. Call it after the last layer_ready()."""
        assert len(payload) <= MAX_PAYLOAD_BYTES
        self.queue.enqueue(self, wire.Commit(self.transfer_id, payload))

    def abort(self, reason: str) -> None:
        """Gives up."""
        self.queue.abort(self, reason)

    def wrote(self, layers: Sequence[LayerBlocks], began_s: float, kv_bytes: int) -> None:
        """The link's thread: layers of one chunk were written. Beyond MAX_CHUNKS the last entry takes in the rest."""
        now_s, first = time.monotonic(), layers[0].first
        chunk = self.chunks.get(first)
        if chunk is None:
            if len(self.chunks) == MAX_CHUNKS:
                chunk = next(reversed(self.chunks.values()))
            else:
                chunk = self.chunks[first] = ChunkPush(began_s, now_s)
        chunk.end_s = now_s
        chunk.busy_s += now_s - began_s
        chunk.kv_bytes += kv_bytes
        chunk.layers = max(chunk.layers, layers[-1].layer + 1)

    def stamped(self, commit: wire.Commit) -> wire.Commit:
        """The link's thread: the message with the times of the push."""
        pushes = [
            PushedChunk(
                micros(chunk.start_s - self.started_s),
                micros(chunk.end_s - chunk.start_s),
                micros(chunk.busy_s),
                chunk.kv_bytes,
                chunk.layers,
            )
            for chunk in self.chunks.values()
        ]
        return structs.replace(commit, sent_us=micros(time.monotonic() - self.started_s), pushes=pushes)

    def end(self, transport: str, *, ok: bool, reason: str) -> None:
        """Tells on_done. The queue calls it once."""
        kv_blocks = self.grant.num_blocks if ok else 0
        self.on_done(PushResult(ok, reason, transport, kv_blocks, self.kv_bytes, time.monotonic() - self.started_s))
