"""Pushes of a prefill worker of several ranks, as rank 0 drives them: one push has a part on every rank.

All parts begin with the same grant; rank 0's commit carries the payload. A push succeeds when all parts do; when one
part fails, the others are aborted. engine/ranks/rank_pushes.py is the other ranks' side.
"""

import threading
from collections.abc import Callable, Sequence

from baton_proto.worker import Grant
from engine.ranks.rank_commands import (
    AbortPush,
    BeginPush,
    CloseSender,
    CommitPush,
    OpenSender,
    Ship,
    ShippedPiece,
)
from engine.ranks.ranks import Ranks
from kvtransfer.prefill_side.push import PushResult
from kvtransfer.prefill_side.sending import KvPush, KvSender, LayerDone, Piece
from kvtransfer.slab.slab import Mark
from kvtransfer.wire.identity import SlabIdentity
from runtime.config.serving import TransferConfig
from runtime.errors import ProtocolError, UnavailableError
from runtime.security.cluster_key import ClusterKey

CLOSE_TIMEOUT_S = 10.0  # twice the longest close of a Sender


class RankedPush:
    """Implements `KvPush`. The sender's lock guards `awaited`, `results` and `failure`."""

    def __init__(self, own: KvPush, ranks: Ranks, on_done: Callable[[PushResult], None]) -> None:
        """`own`: rank 0's part."""
        self.transfer_id, self.started_s = own.transfer_id, own.started_s
        self.on_done = on_done
        self.awaited = set(range(ranks.size))  # ranks whose part has not ended
        self.results: list[PushResult] = []  # in order of arrival, but rank 0's first
        self.failure = ""  # reason of the first part that failed
        self._own = own
        self._ranks = ranks

    def layer_ready(self, layer: int, first: int, source_blocks: Sequence[int], ready: Mark | None = None) -> None:
        """Ships rank 0's part; `RankedSender.ship` has told the other ranks."""
        self._own.layer_ready(layer, first, source_blocks, ready)

    def commit(self, payload: bytes) -> None:
        self._own.commit(payload)
        self._ranks.tell(CommitPush(self.transfer_id))

    def abort(self, reason: str) -> None:
        self._own.abort(reason)
        self._ranks.tell(AbortPush(self.transfer_id, reason))

    def take(self, rank: int, result: PushResult) -> None:
        self.awaited.discard(rank)
        self.results.insert(0 if rank == 0 else len(self.results), result)

    def result(self) -> PushResult:
        """The whole push's result: bytes add up, the slowest part gives the time."""
        first = self.results[0]
        return PushResult(
            ok=not self.failure,
            reason=self.failure,
            transport=first.transport,
            kv_blocks=0 if self.failure else first.kv_blocks,
            kv_bytes=sum(result.kv_bytes for result in self.results),
            seconds=max(result.seconds for result in self.results),
        )


class RankedSender:
    """Implements `KvSender`. Methods raise RankLostError when a rank is lost; the worker then ends, and pushes that are
    open get no result."""

    def __init__(
        self,
        own: KvSender,
        identity: SlabIdentity,
        config: TransferConfig,
        ranks: Ranks,
        key: ClusterKey | None = None,
    ) -> None:
        """`own`: rank 0's sender, which this object closes."""
        self._own = own
        self._ranks = ranks
        self._config = config
        self._key = key
        self._changed = threading.Condition()
        self._open: dict[str, RankedPush] = {}
        self._closed = False
        ranks.listen(self._ended)
        self._open_senders(identity)

    def begin(self, grant: Grant, on_done: Callable[[PushResult], None]) -> RankedPush:
        with self._changed:  # because no end may be handled before every rank has been told to begin
            if self._closed:
                raise UnavailableError("the KV sender is closed")
            if grant.transfer_id in self._open:
                raise ProtocolError(f"decode worker {grant.worker_id}", f"granted {grant.transfer_id} a second time")
            own = self._own.begin(grant, lambda result: self._ended(0, grant.transfer_id, result))
            push = self._open[grant.transfer_id] = RankedPush(own, self._ranks, on_done)
            self._ranks.tell(BeginPush(grant))
            return push

    def ship(self, pieces: Sequence[Piece]) -> LayerDone:
        told = [ShippedPiece(piece.push.transfer_id, piece.first, piece.source, piece.tail) for piece in pieces]
        self._ranks.tell(Ship(told))
        return self._own.ship(pieces)

    def let_go(self, timeout_s: float) -> None:
        """Closes rank 0's links. Links of the other ranks stay, because without a push they read nothing."""
        self._own.let_go(timeout_s)

    def identify(self, identity: SlabIdentity) -> None:
        self._own.identify(identity)
        self._open_senders(identity)

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
        self._own.close()  # first: what the decode worker says when another rank's link ends is no reason of ours
        self._ranks.wait_done(self._ranks.tell(CloseSender()), CLOSE_TIMEOUT_S)
        with self._changed:  # all parts have ended, but reports may be on their way
            self._changed.wait_for(lambda: not self._open, CLOSE_TIMEOUT_S)

    def _open_senders(self, identity: SlabIdentity) -> None:
        shown = (None, "off") if self._key is None else (self._key.secret.reveal(), self._key.mode)
        names = (identity.worker_id, identity.incarnation, identity.model_hash)
        self._ranks.tell(OpenSender(*names, self._config, *shown))

    def _ended(self, rank: int, transfer_id: str, result: PushResult) -> None:
        """One rank's part has ended. Any thread. Raises ProtocolError when that part is not awaited."""
        with self._changed:
            push = self._open.get(transfer_id)
            if push is None or rank not in push.awaited:
                raise ProtocolError(f"rank {rank}", f"ended push {transfer_id}, which nobody awaits of it")
            push.take(rank, result)
            is_first_failure = not (result.ok or push.failure)
            if is_first_failure:
                push.failure = result.reason or "unknown"
            is_over = not push.awaited
            if is_over:
                del self._open[transfer_id]
                self._changed.notify_all()
        if is_over:
            push.on_done(push.result())
        elif is_first_failure:
            push.abort(push.failure)
