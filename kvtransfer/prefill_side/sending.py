"""What a prefill worker's engine sees of its transfers, whether the worker is one rank (sender.py) or several
(engine/ranks/ranked_sender.py)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton_proto.worker import Grant
from kvtransfer.prefill_side.push import PushResult
from kvtransfer.slab.slab import Mark
from kvtransfer.wire.identity import SlabIdentity

LayerDone = Callable[[int], None]


class KvPush(Protocol):
    """A transfer to a decode worker; see `kvtransfer.prefill_side.push.Push`."""

    @property
    def transfer_id(self) -> str: ...

    @property
    def started_s(self) -> float: ...

    def layer_ready(self, layer: int, first: int, source_blocks: Sequence[int], ready: Mark | None = None) -> None: ...

    def commit(self, payload: bytes) -> None: ...

    def abort(self, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks of a transfer that one engine step completes, in every layer that has them."""

    push: KvPush
    first: int  # index of the first one among the granted blocks
    source: tuple[int, ...]  # our blocks that belong there and behind it
    tail: int = 0  # used tokens of the last block when it stays partial, else 0


class KvSender(Protocol):
    def begin(self, grant: Grant, on_done: Callable[[PushResult], None]) -> KvPush:
        """Returns at once. Failures and refusals come through `on_done`, which any thread calls, once, when nobody
        reads the source blocks any more.

        Raises UnavailableError after close() or without a thread for a link, ProtocolError for a grant that is in use;
        `on_done` is not called then.
        """

    def ship(self, pieces: Sequence[Piece]) -> LayerDone:
        """Engine thread, right before the step that completes the pieces. Returns what is to be called after each of
        the step's layers. Clears partial blocks behind their used tokens; the step itself writes in front of these."""

    def let_go(self, timeout_s: float) -> None:
        """Ends the links to all peers, so that the slab may be given back. The next push makes new links. Raises
        UnavailableError when pushes take longer to end."""

    def identify(self, identity: SlabIdentity) -> None:
        """Who the worker is from now on, after let_go(): its weights are others."""

    def close(self) -> None:
        """Aborts what is open, ends threads and connections. Idempotent."""
