"""The pushes of a prefill rank other than rank 0: carries out rank 0's commands (engine/ranks/ranked_sender.py) and
reports how this rank's part of each push ended."""

import threading
from collections.abc import Callable
from dataclasses import replace

from engine.ranks.rank_commands import AbortPush, BeginPush, CloseSender, CommitPush, OpenSender, PushCommand, Ship
from kvtransfer.prefill_side.push import Push, PushResult
from kvtransfer.prefill_side.sender import Sender
from kvtransfer.prefill_side.sending import LayerDone, Piece
from kvtransfer.slab.head_plan import Shard
from kvtransfer.slab.slab import Slab
from kvtransfer.wire.identity import SlabIdentity
from runtime.errors import BatonError, ProtocolError
from runtime.security.cluster_key import ClusterKey
from runtime.security.secret import Secret


class RankPushes:
    def __init__(
        self, slab: Slab, shard: Shard, num_kv_heads: int, on_ended: Callable[[str, PushResult], None]
    ) -> None:
        """`num_kv_heads`: the whole model's. `on_ended(transfer_id, result)`: called once per push, by any thread."""
        self._slab = slab
        self._shard = shard
        self._layout = replace(slab.layout, num_kv_heads=num_kv_heads)
        self._on_ended = on_ended
        self._sender: Sender | None = None
        self._lock = threading.Lock()
        self._open: dict[str, Push] = {}
        self._layer_done: LayerDone | None = None

    def obey(self, command: PushCommand) -> None:
        """Raises ProtocolError when another command comes before OpenSender."""
        match command:
            case OpenSender():
                identity = SlabIdentity(
                    command.worker_id, command.incarnation, command.model_hash, self._layout, self._shard
                )
                key = None if command.cluster_key is None else ClusterKey(Secret(command.cluster_key), command.tls)
                if self._sender is not None:  # of former weights; no push is open
                    self._sender.close()
                self._sender = Sender(self._slab, identity, command.config, key)
            case BeginPush():
                self._begin(self._opened(), command)
            case Ship():
                self._ship(self._opened(), command)
            case CommitPush():
                if push := self._push(command.transfer_id):
                    push.commit(b"")
            case AbortPush():
                if push := self._push(command.transfer_id):
                    push.abort(command.reason)
            case CloseSender():
                self._opened().close()

    def take_layer_done(self) -> LayerDone | None:
        """The hook that the step beginning now has to call after each layer; a hook is good for one step."""
        layer_done, self._layer_done = self._layer_done, None
        return layer_done

    def _opened(self) -> Sender:
        if self._sender is None:
            raise ProtocolError("rank 0", "pushes before it has said who it is")
        return self._sender

    def _begin(self, sender: Sender, command: BeginPush) -> None:
        transfer_id = command.grant.transfer_id
        try:
            with self._lock:  # because the push may end before `_open` has it
                self._open[transfer_id] = sender.begin(command.grant, lambda result: self._ended(transfer_id, result))
        except BatonError as error:
            self._on_ended(transfer_id, PushResult(False, str(error), "", 0, 0, 0.0))

    def _ship(self, sender: Sender, command: Ship) -> None:
        pieces = [
            Piece(push, piece.first, piece.source, piece.tail)
            for piece in command.pieces
            if (push := self._push(piece.transfer_id)) is not None
        ]
        self._layer_done = sender.ship(pieces) if pieces else None

    def _push(self, transfer_id: str) -> Push | None:
        """The push; None when it has ended."""
        with self._lock:
            return self._open.get(transfer_id)

    def _ended(self, transfer_id: str, result: PushResult) -> None:
        with self._lock:
            del self._open[transfer_id]
        self._on_ended(transfer_id, result)
