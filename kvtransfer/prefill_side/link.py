"""The prefill side of one connection to a decode worker, shared by all pushes to that worker.

The link's own thread connects, and is the only thread that reads our slab and sends. The listener, a second thread,
receives what the decode worker says. Invariant: once a push is done, the link's thread does not touch its blocks.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

import structlog

from baton_proto import transfer as wire
from baton_proto.worker import Grant
from kvtransfer.prefill_side.dial import Dialled, dial
from kvtransfer.prefill_side.layer_writer import LayerWriter
from kvtransfer.prefill_side.push import ChunkPush, LayerBlocks, Push, PushResult
from kvtransfer.slab.slab import EngineSlab
from kvtransfer.transports.transport import BlockWriter
from kvtransfer.wire.identity import SlabIdentity
from kvtransfer.wire.sockets import STALL_TIMEOUT_S
from runtime.config.serving import TransferConfig
from runtime.errors import BatonError, ProtocolError, UnavailableError
from runtime.security.cluster_key import ClusterKey

log = structlog.get_logger()


class Link:
    """Carries out pushes into one generation of one worker's slab. `first`: the grant that the link is made for."""

    def __init__(
        self,
        slab: EngineSlab,
        identity: SlabIdentity,
        config: TransferConfig,
        first: Grant,
        on_closed: Callable[["Link"], None],
        key: ClusterKey | None,
    ) -> None:
        self._key = key
        self._slab = slab
        self._identity = identity
        self._config = config
        self._first = first
        self._on_closed = on_closed
        self._changed = threading.Condition()
        self._pushes: dict[str, Push] = {}  # not done
        self._runnable: deque[Push] = deque()  # pushes that the link's thread has something to do for
        self._broken = ""  # why the connection is of no use any more
        self._retired = False  # the link takes no more pushes and ends with its last one
        self._dialled: Dialled | None = None
        self._on_their_way: list[ChunkPush] = []  # written at once and not settled
        self._thread = threading.Thread(target=self._run, name=f"kv-send-{first.worker_id}", daemon=True)
        self._listener = threading.Thread(target=self._listen, name=f"kv-answers-{first.worker_id}", daemon=True)

    def start(self) -> None:
        """Raises UnavailableError when there is no thread for the link."""
        try:
            self._thread.start()
        except (RuntimeError, MemoryError) as error:
            raise UnavailableError(f"no thread for a KV link: {error}") from error

    def add(self, grant: Grant, on_done: Callable[[PushResult], None]) -> Push | None:
        """Begins a push. None: this link has ended, make a new one. Raises ProtocolError when the grant is in use."""
        push = Push(self, grant, on_done)
        with self._changed:
            if self._broken or self._retired:
                return None
            if grant.transfer_id in self._pushes:
                raise ProtocolError(f"decode worker {grant.worker_id}", f"granted {grant.transfer_id} a second time")
            self._pushes[grant.transfer_id] = push
            self._wake(push)
        return push

    def enqueue(self, push: Push, operation: LayerBlocks | wire.Commit) -> None:
        with self._changed:
            if push.done or push.stop:
                return
            push.operations.append(operation)
            if push.accepted and self._is_due(operation):
                self._wake(push)

    def abort(self, push: Push, reason: str) -> None:
        with self._changed:
            self._abort(push, reason)

    def retire(self, reason: str | None = None) -> None:
        """Ends the link once its pushes are done; with a reason, aborts them."""
        with self._changed:
            self._retired = True
            if reason is not None:
                for push in self._pushes.values():
                    self._abort(push, reason)
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Waits for the end of a retired link. False: the link has not ended after `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Waits for the end of a retired link; after `timeout_s`, breaks the connection and waits as long again."""
        if not self.wait(timeout_s) and self._dialled is not None:
            self._break("the link was closed")
            self._thread.join(timeout_s)

    # --- the link's thread ---

    def _run(self) -> None:
        reason = "the link was closed"
        try:
            self._dialled = dialled = dial(self._slab, self._identity, self._config, self._first, self._key)
            writer = LayerWriter(self._slab, dialled, self._config.checksum)
            self._listener.start()
            while (push := self._next(dialled.writer)) is not None:
                self._advance(push, dialled, writer)
        except (BatonError, OSError) as error:
            reason = str(error) or type(error).__name__
            report = log.warning if self._pushes else log.info
            report("KV link to decode worker ended", worker_id=self._first.worker_id, reason=reason)
        except Exception as error:  # a fault of ours ends this link, not the worker
            log.exception("KV link failed", worker_id=self._first.worker_id)
            reason = f"internal error: {error}"
        self._wind_up(reason)

    def _next(self, writer: BlockWriter) -> Push | None:
        """Returns a push that has something to do; until there is one, settles blocks that are on their way. None: the
        link is retired and has no push left. Raises ConnectionError when the connection is broken."""
        settled = True
        while True:
            with self._changed:
                if self._broken:
                    raise ConnectionError(self._broken)
                self._stop_overdue(time.monotonic())
                if self._runnable:
                    push = self._runnable.popleft()
                    push.queued = False
                    return push
                if self._retired and not self._pushes:
                    return None
                if not settled:
                    due_s = min((push.deadline_s for push in self._pushes.values()), default=None)
                    self._changed.wait(None if due_s is None else max(0.0, due_s - time.monotonic()))
            settled = writer.settle()
            if not settled:
                self._settled()

    def _advance(self, push: Push, dialled: Dialled, writer: LayerWriter) -> None:
        """Does one step of one push: pushes to the same worker take turns."""
        if push.done:
            return
        if push.stop is not None:
            writer.settle_all()
            # Ended before it is sent: another rank may hear at once that its part has no lease, and that is no reason.
            self._finish(push, ok=False, reason=push.reason)
            dialled.channel.send(push.stop)  # also when the push was not begun: its lease ends sooner
        elif not push.begun:
            self._begin(push, dialled)
        else:
            self._carry_out(push, dialled, writer)

    def _begin(self, push: Push, dialled: Dialled) -> None:
        grant = push.grant
        outside = [block for block in grant.block_ids if not 0 <= block < dialled.peer_layout.num_ids]
        if outside:
            self._finish(push, ok=False, reason=f"granted block {outside[0]} is outside the decode worker's slab")
            return
        with self._changed:
            push.begun = True
            push.deadline_s = min(push.deadline_s, time.monotonic() + self._config.connect_timeout_s)
        dialled.channel.send(wire.Begin(grant.transfer_id, len(grant.block_ids), self._config.checksum))

    def _carry_out(self, push: Push, dialled: Dialled, writer: LayerWriter) -> None:
        layers: list[LayerBlocks] = []
        commit: wire.Commit | None = None
        with self._changed:
            for operation in self._take_due(push):
                if isinstance(operation, wire.Commit):
                    commit = operation
                    push.deadline_s = min(push.deadline_s, time.monotonic() + STALL_TIMEOUT_S)
                else:
                    layers.append(operation)
        self._write(push, layers, dialled, writer)
        if commit is not None:
            writer.settle_all()
            self._settled()
            dialled.channel.send(push.stamped(commit))
        with self._changed:
            if push.accepted and any(map(self._is_due, push.operations)):
                self._wake(push)

    def _write(self, push: Push, layers: list[LayerBlocks], dialled: Dialled, writer: LayerWriter) -> None:
        if not layers:
            return
        began_s, before = time.monotonic(), push.kv_bytes
        writer.write(push, layers)
        push.wrote(layers, began_s, push.kv_bytes - before)
        if dialled.writer.at_once:
            self._on_their_way.append(next(reversed(push.chunks.values())))

    def _settled(self) -> None:
        """All that was written at once is in place now."""
        now_s = time.monotonic()
        for chunk in self._on_their_way:
            chunk.busy_s += now_s - chunk.end_s
            chunk.end_s = now_s
        self._on_their_way.clear()

    def _finish(self, push: Push, *, ok: bool, reason: str) -> None:
        """Ends a push whose blocks the link's thread reads no more. Only the first call for a push has an effect."""
        with self._changed:
            if push.done:
                return
            push.done = True
            del self._pushes[push.transfer_id]
            self._changed.notify_all()
        try:
            push.end(self._dialled.transport if self._dialled else "", ok=ok, reason=reason)
        except Exception:
            log.exception("the owner of a push failed on its end", transfer_id=push.transfer_id)

    def _wind_up(self, reason: str) -> None:
        with self._changed:
            self._broken = self._broken or reason
            reason = self._broken
            left = list(self._pushes.values())
        if self._dialled is not None:
            self._dialled.channel.shutdown()
            try:
                self._dialled.writer.close()
            except Exception:  # whoever waits for the pushes learns of their end all the same
                log.exception("a writer of KV did not close well", worker_id=self._first.worker_id)
            if self._listener.ident is not None:  # else there was no thread for it
                self._listener.join()
            self._dialled.channel.close()
        self._on_closed(self)
        for push in left:
            self._finish(push, ok=False, reason=push.reason or reason)

    # --- the listener ---

    def _listen(self) -> None:
        assert self._dialled is not None
        reason = f"decode worker {self._first.worker_id} closed the connection"
        try:
            while (message := self._dialled.channel.receive()) is not None:
                self._on_message(message)
        except (BatonError, OSError) as error:
            reason = str(error)
        self._break(reason)

    def _on_message(self, message: wire.ToPrefill) -> None:
        if isinstance(message, wire.Welcome | wire.Refused):
            raise ProtocolError(f"decode worker {self._first.worker_id}", f"sent {type(message).__name__} in mid-talk")
        with self._changed:
            push = self._pushes.get(message.transfer_id)
            if push is None:
                return  # the push is done already
            match message:
                case wire.Accept():
                    push.accepted = True
                    push.deadline_s = push.started_s + push.grant.ttl_s
                    if push.operations:
                        self._wake(push)
                case wire.Cancel():
                    self._stop(push, wire.Drained(message.transfer_id), message.reason)
        # Nothing of a rejected push was read, and nothing of a committed one is left to read.
        if isinstance(message, wire.Reject):
            self._finish(push, ok=False, reason=push.reason or message.reason)
        elif isinstance(message, wire.Committed):
            self._finish(push, ok=True, reason="")

    def _break(self, reason: str) -> None:
        with self._changed:
            self._broken = self._broken or reason
            self._changed.notify_all()
        if self._dialled is not None:
            self._dialled.channel.shutdown()  # wakes a thread that waits for the socket

    # --- with the lock held ---

    def _is_due(self, operation: LayerBlocks | wire.Commit) -> bool:
        """Whether the operation and all operations before it can be carried out now. When the transport ships a chunk's
        layers at once, a layer waits for the last one that sees all; what comes behind it, for the next one or the end.
        """
        assert self._dialled is not None
        if isinstance(operation, wire.Commit) or not self._dialled.writer.at_once:
            return True
        return operation.layer == self._slab.layout.last_layer

    def _take_due(self, push: Push) -> list[LayerBlocks | wire.Commit]:
        """The operations up to and with the first one that is due; none when no operation is due."""
        dues = map(self._is_due, push.operations) if push.accepted else ()
        number = next((number for number, due in enumerate(dues, 1) if due), 0)
        return [push.operations.popleft() for _ in range(number)]

    def _wake(self, push: Push, *, first: bool = False) -> None:
        if not push.queued:
            push.queued = True
            self._runnable.append(push)
        if first and self._runnable[0] is not push:
            self._runnable.remove(push)
            self._runnable.appendleft(push)
        self._changed.notify_all()

    def _abort(self, push: Push, reason: str) -> None:
        self._stop(push, wire.Abort(push.transfer_id, reason[: wire.MAX_REASON]), reason)

    def _stop(self, push: Push, message: wire.Abort | wire.Drained, reason: str) -> None:
        if not push.done and push.stop is None:
            push.stop, push.reason = message, reason
            push.operations.clear()
            self._wake(push, first=True)

    def _stop_overdue(self, now_s: float) -> None:
        for push in list(self._pushes.values()):
            if now_s >= push.deadline_s:
                ended = now_s >= push.started_s + push.grant.ttl_s
                self._abort(push, "the grant ran out of time" if ended else "the decode worker did not answer in time")
