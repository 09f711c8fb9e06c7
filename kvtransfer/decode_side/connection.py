"""The decode side of one connection from a rank of a prefill worker, after its Hello: a thread that checks, receives,
answers, and in the end waits until the peer is proven unable to write. The ledger keeps the books.
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import structlog

from baton_proto import transfer as wire
from baton_proto.decoding import MAX_NAME
from kvtransfer.decode_side.ledger import Ledger, Notice
from kvtransfer.slab.head_plan import WHOLE, Part, Shard, parts
from kvtransfer.slab.slab import EngineSlab, RankSlab
from kvtransfer.transports.host_window import HostWindow
from kvtransfer.transports.transport import BlockIntake, DecodeEnd, Transport
from kvtransfer.wire.checksum import CHECKSUM_BYTES, block_checksums, mismatches
from kvtransfer.wire.framing import Channel
from kvtransfer.wire.identity import SlabIdentity, check_hello
from kvtransfer.wire.sockets import STALL_TIMEOUT_S, kind_of, tune
from runtime.config.serving import TransferConfig
from runtime.errors import BatonError, HandshakeError, ProtocolError

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Reception:
    """What all connections of a receiver share."""

    slab: EngineSlab  # of rank 0
    slabs: Sequence[RankSlab]  # of ranks 0, 1, ...
    identity: SlabIdentity
    config: TransferConfig
    offered: Sequence[Transport]
    ledger: Ledger
    closing_fd: int  # becomes readable when the receiver gives up waiting


class Connection:
    """`number` is the writer's name in the ledger. `on_end` is the last thing that the thread calls."""

    def __init__(
        self,
        sock: socket.socket,
        hello: wire.Hello,
        number: int,
        shared: Reception,
        on_end: Callable[["Connection"], None],
    ) -> None:
        self.number = number
        rank = f" rank {hello.rank}" if hello.size > 1 else ""
        self.peer = f"prefill worker {hello.sender}{rank}"
        self._hello = hello
        self._shared = shared
        self._slab, self._slabs = shared.slab, shared.slabs
        self._identity, self._config, self._ledger = shared.identity, shared.config, shared.ledger
        self._on_end = on_end
        self._generation = 0
        # The next five are known after the Welcome; nothing is written before it.
        self._transport: Transport | None = None
        self._taking: BlockIntake | None = None
        self._shard = WHOLE  # the peer's rank
        self._parts: tuple[Part, ...] = ()
        self._windows: list[list[HostWindow]] = []  # for each part one per target, for checksums
        self._granted: dict[str, tuple[int, ...]] = {}  # begun here and not ended, quarantined ones included
        self._checked: set[str] = set()  # transfers of these that come with checksums
        self._drain_by_s: dict[str, float] = {}  # transfers that the peer was told to stop and has not drained
        self._channel: Channel[wire.ToDecode] = Channel(sock, wire.decode_to_decode, self.peer)
        if kind_of(sock) == "tcp":
            tune(sock)
        self._thread = threading.Thread(target=self._run, name=f"kv-receive-{number}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def tell(self, notice: Notice) -> None:
        """Tells the peer to stop writing a transfer. Never waits: a peer that does not read loses its connection."""
        self._drain_by_s[notice.transfer_id] = time.monotonic() + STALL_TIMEOUT_S
        try:
            self._channel.send_now(wire.Cancel(notice.transfer_id, notice.reason[: wire.MAX_REASON]))
        except OSError:
            self._channel.shutdown()

    def drain_by_s(self) -> float | None:
        """When to stop waiting for Drained and end the connection; None where its end does not prove silence."""
        if self._taking is None or self._taking.peer_writes:
            return None
        return min((by_s for name, by_s in list(self._drain_by_s.items()) if name in self._granted), default=None)

    def shutdown(self) -> None:
        self._channel.shutdown()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._shake_hands()
            self._intake.await_message()
            while (message := self._channel.receive()) is not None:
                self._on_message(message)
                self._intake.await_message()
            reason = f"{self.peer} closed the connection"
        except BatonError as error:
            log.error("KV connection refused", peer=self.peer, error=str(error))
            reason = str(error)
        except OSError as error:
            reason = f"the connection to {self.peer} broke: {error}"
        except Exception as error:  # a fault of ours ends this connection, not the worker
            log.exception("KV connection failed", peer=self.peer)
            reason = f"internal error: {error}"
        self._wind_up(reason)

    def _wind_up(self, reason: str) -> None:
        self._channel.shutdown()  # makes a peer that is still there stop and let go of its mapping
        if self._ledger.writer_lost(self.number, reason):
            log.warning("a prefill worker was lost with transfers open", peer=self.peer, reason=reason)
            self._ledger.deliver()
            if self._intake.await_silence(self._shared.closing_fd):
                self._ledger.writer_silent(self.number)
                self._ledger.deliver()
        if self._taking is not None:
            self._taking.close()
        self._channel.close()
        self._on_end(self)

    def _shake_hands(self) -> None:
        """Raises HandshakeError, ProtocolError or OSError; the peer learns which field did not fit."""
        hello, timeout_s = self._hello, self._config.connect_timeout_s
        self._channel.sock.settimeout(None)
        self._shard = Shard(hello.rank, hello.size)
        self._generation = self._slab.generation
        try:
            check_hello(hello, self._identity, self._generation)
        except HandshakeError as error:
            limit = MAX_NAME
            self._channel.send_now(wire.Refused(error.field, str(error.ours)[:limit], str(error.theirs)[:limit]))
            raise
        self._transport = self._offered(hello.transport)
        _, make_intake = self._transport.load()
        self._taking = make_intake(DecodeEnd(self._channel, self._slabs, timeout_s))
        size = self._identity.shard.size
        self._parts = parts(self._shard, size, self._identity.layout.num_kv_heads)
        self._windows = [
            [HostWindow(self._slabs[target.rank], target.heads) for target in part.targets] for part in self._parts
        ]
        layout = self._slab.layout
        welcome = wire.Welcome(wire.MAJOR, layout.num_blocks, size, layout.num_window_blocks)
        self._intake.welcome(welcome, self._parts)

    def _offered(self, name: str) -> Transport:
        """Raises ProtocolError when we offered no such transport on this kind of socket."""
        for transport in self._shared.offered:
            if (transport.name, transport.socket) == (name, kind_of(self._channel.sock)):
                return transport
        raise ProtocolError(self.peer, f"wants to send by {name!r}, which was not offered")

    @property
    def _intake(self) -> BlockIntake:
        assert self._taking is not None, "nothing is written before the Hello"
        return self._taking

    def _on_message(self, message: wire.ToDecode) -> None:
        match message:
            case wire.Blocks():
                self._blocks(message)
            case wire.Begin():
                self._begin(message)
            case wire.Commit():
                self._commit(message)
            case wire.Abort():
                self._end(message.transfer_id, message.reason)
            case wire.Drained():
                self._end(message.transfer_id, f"{self.peer} stopped writing")
            case wire.Hello():
                raise ProtocolError(self.peer, "says Hello a second time")
        self._ledger.deliver()

    def _begin(self, message: wire.Begin) -> None:
        refusal = self._refusal(message)
        if refusal:
            self._channel.send_now(wire.Reject(message.transfer_id, refusal))
        else:
            self._channel.send_now(wire.Accept(message.transfer_id))

    def _refusal(self, message: wire.Begin) -> str:
        """Why this transfer may not be written; empty when it may, and then it is begun."""
        if any(slab.suspended for slab in self._slabs) or self._slab.generation != self._generation:
            return "the slab was suspended since the grant"
        if self._config.checksum and not message.checksum:
            return "checksums are required here"
        try:
            granted = self._ledger.begin(
                message.transfer_id, self.number, self._shard, message.num_blocks, time.monotonic()
            )
        except ProtocolError as error:
            self._ledger.fail(message.transfer_id, str(error))
            return str(error)
        if granted is None:
            return "no such lease: it was cancelled, ran out of time or was begun before"
        self._granted[message.transfer_id] = granted
        if message.checksum:
            self._checked.add(message.transfer_id)
        return ""

    def _blocks(self, message: wire.Blocks) -> None:
        granted = self._known(message.transfer_id)
        layers, num_layers = message.layer_range, self._slab.layout.num_layers
        if not layers.start < layers.stop <= num_layers:
            raise ProtocolError(
                self.peer, f"writes layers [{layers.start}, {layers.stop}); the model has {num_layers} layers"
            )
        first, end = message.first, message.first + message.count
        if not first < end <= len(granted):
            raise ProtocolError(self.peer, f"writes blocks [{first}, {end}); granted are {len(granted)} blocks")
        blocks = granted[first:end]
        for layer in layers:
            ids = self._slab.layout.layer_blocks(layer)
            if min(blocks) not in ids or max(blocks) not in ids:
                raise ProtocolError(self.peer, f"writes blocks [{first}, {end}) of layer {layer}, which has others")
        self._intake.take(layers, blocks)
        try:
            if message.transfer_id in self._checked:
                self._intake.settle()
                self._verify(message, blocks)
            self._ledger.arrived(message.transfer_id, self.number, layers, first, message.count)
        except ProtocolError as error:
            self._fail(message.transfer_id, str(error))

    def _verify(self, message: wire.Blocks, blocks: tuple[int, ...]) -> None:
        """Raises ProtocolError when a block is not what was sent."""
        size = len(blocks) * CHECKSUM_BYTES
        due = message.layers * len(self._parts) * size
        if len(message.checksums) != due:
            raise ProtocolError(self.peer, f"sent {len(message.checksums)} bytes of checksums; due are {due}")
        parts = zip(self._parts, self._windows, strict=True)
        for index, (layer, (part, windows)) in enumerate(product(message.layer_range, parts)):
            theirs = message.checksums[index * size : (index + 1) * size]
            nbytes = len(part.heads) * self._slab.layout.head_bytes
            for window in windows:
                ours = block_checksums(window.read(layer, blocks), nbytes)
                if wrong := mismatches(ours, theirs):
                    block = message.first + wrong[0]
                    raise ProtocolError(self.peer, f"checksum of layer {layer}, granted block {block} differs")

    def _commit(self, message: wire.Commit) -> None:
        self._known(message.transfer_id)
        self._intake.settle()
        assert self._transport is not None
        try:
            if not self._ledger.commit(message, self.number, self._transport.name):
                return  # it failed meanwhile; the peer has a Cancel to answer
        except ProtocolError as error:
            self._fail(message.transfer_id, str(error))
            return
        self._forget(message.transfer_id)
        self._ledger.deliver()  # first: the sequence can run while the answer travels
        self._channel.send_now(wire.Committed(message.transfer_id))

    def _end(self, transfer_id: str, reason: str) -> None:
        """The peer has written its last byte, after our Cancel or its own Abort, or will not write at all."""
        if transfer_id not in self._granted:
            self._ledger.abandon(transfer_id, self._shard, reason)
            return
        self._intake.settle()
        self._ledger.writer_stopped(transfer_id, self.number, reason)
        self._forget(transfer_id)

    def _fail(self, transfer_id: str, reason: str) -> None:
        if self._ledger.fail(transfer_id, reason):
            log.error("KV transfer failed", transfer_id=transfer_id, peer=self.peer, reason=reason)
            self._ledger.deliver()

    def _known(self, transfer_id: str) -> tuple[int, ...]:
        granted = self._granted.get(transfer_id)
        if granted is None:
            raise ProtocolError(self.peer, f"means transfer {transfer_id!r}, which it has not begun")
        return granted

    def _forget(self, transfer_id: str) -> None:
        del self._granted[transfer_id]
        self._checked.discard(transfer_id)
        self._drain_by_s.pop(transfer_id, None)
