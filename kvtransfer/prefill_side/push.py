"""One transfer as the prefill side sees it: what the engine hands in, in order, and how it ended."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton_proto import transfer as wire
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
    seconds: float  # from begin() on


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """Our blocks `source` are final in this layer and belong into granted blocks [first, ...)."""

    layer: int
    first: int
    source: Sequence[int]
    ready: Mark | None = None  # when they are computed

    def continues(self, earlier: "LayerBlocks") -> bool:
        """Whether these are the same blocks in the next layer."""
        return self.layer == earlier.layer + 1 and (self.first, self.source) == (earlier.first, earlier.source)


@dataclass(slots=True, eq=False)
class PushState:
    """What a link knows of a push. Guarded by the link's lock, but for what the comments give to its thread."""

    grant: Grant
    on_done: Callable[[PushResult], None]
    started_s: float
    deadline_s: float  # when the step that is waited for must have happened
    operations: deque[LayerBlocks | wire.Commit] = field(default_factory=deque)
    stop: wire.Abort | wire.Drained | None = None  # what the peer is told instead of the remaining operations
    reason: str = ""
    begun: bool = False
    accepted: bool = False
    queued: bool = False  # in the link's list of pushes that have something to do
    done: bool = False
    kv_bytes: int = 0  # the link's thread


class PushQueue(Protocol):
    """The link, as a push needs it."""

    def enqueue(self, state: PushState, operation: LayerBlocks | wire.Commit) -> None: ...

    def abort(self, state: PushState, reason: str) -> None: ...


class Push:
    """What the engine thread holds: every call returns at once and is carried out in order by the link's thread.

    Calls after the end (a cancel by the decode worker, say) are ignored; on_done has told.
    """

    def __init__(self, queue: PushQueue, state: PushState) -> None:
        self._queue = queue
        self._state = state

    @property
    def transfer_id(self) -> str:
        return self._state.grant.transfer_id

    def layer_ready(self, layer: int, first: int, source_blocks: Sequence[int], ready: Mark | None = None) -> None:
        """`source_blocks[i]` holds what belongs into `grant.block_ids[first + i]`, from `ready` on and until on_done.

        What was handed in before is computed by then, too.
        The unused tail of a last, partial block is shipped too: the caller has zeroed it where stale values could hurt.
        """
        assert 0 <= first <= first + len(source_blocks) <= len(self._state.grant.block_ids)
        if source_blocks:
            self._queue.enqueue(self._state, LayerBlocks(layer, first, tuple(source_blocks), ready))

    def commit(self, payload: bytes) -> None:
        """After the last layer_ready."""
        assert len(payload) <= MAX_PAYLOAD_BYTES
        self._queue.enqueue(self._state, wire.Commit(self._state.grant.transfer_id, payload))

    def abort(self, reason: str) -> None:
        """Gives up. No effect once it is done."""
        self._queue.abort(self._state, reason)
