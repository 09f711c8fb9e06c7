"""What a prefill worker's engine sees of its transfers, whether the worker is one rank (sender.py) or several
(engine/ranks/ranked_sender.py)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton_proto.worker import Grant
from kvtransfer.prefill_side.push import PushResult
from kvtransfer.slab.slab import Mark

LayerDone = Callable[[int], None]


class KvPush(Protocol):
    """A transfer to a decode worker. Every call returns at once; after the end they are ignored."""

    @property
    def transfer_id(self) -> str: ...

    def layer_ready(self, layer: int, first: int, source_blocks: Sequence[int], ready: Mark | None = None) -> None:
        """See `kvtransfer.prefill_side.push.Push`. `KvSender.ship` is who calls it in a worker."""
        ...

    def commit(self, payload: bytes) -> None:
        """After the last blocks."""
        ...

    def abort(self, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks of a transfer that one engine step completes, in every layer."""

    push: KvPush
    first: int  # of the granted blocks
    source: tuple[int, ...]  # our blocks that belong there and after it
    tail: int = 0  # used tokens of the last one when it stays partial, else 0


class KvSender(Protocol):
    def begin(self, grant: Grant, on_done: Callable[[PushResult], None]) -> KvPush:
        """Failures come through `on_done`: called once, from any thread, when nobody reads the source blocks any more.

        Raises UnavailableError after close(), ProtocolError for a grant that is in use; `on_done` is not called then.
        """
        ...

    def ship(self, pieces: Sequence[Piece]) -> LayerDone:
        """Right before the step that completes them, on the engine's thread. What comes back is to be called after each
        of its layers. Partial blocks are cleared behind their used tokens: the step itself writes in front of that."""
        ...

    def let_go(self, timeout_s: float) -> None:
        """No push is open: ends the links to all peers, so that the slab may be given back. The next push makes new
        ones. Raises UnavailableError when that takes longer."""
        ...

    def close(self) -> None:
        """Aborts what is open, ends threads and connections. Idempotent."""
        ...
