"""TCP: the sending kernel gathers blocks from one slab, the receiving one scatters them into the others.

Only the decode worker's own thread writes its slabs here: the end of the connection proves that nobody writes any more.
"""

import socket
from collections.abc import Sequence

from baton_proto.transfer import ToDecode, ToPrefill, Welcome
from kvtransfer.slab.adopted_slab import RankSlab
from kvtransfer.slab.head_plan import Part
from kvtransfer.slab.slab import Slab
from kvtransfer.transports.host_window import HostWindow
from kvtransfer.transports.transport import STALL_TIMEOUT_S, Shipment, piece_blocks
from kvtransfer.wire.framing import Channel


class TcpWriter:
    transport = "tcp"
    at_once = False

    def __init__(self, channel: Channel[ToPrefill], slab: Slab, parts: Sequence[Part]) -> None:
        self.piece_blocks = piece_blocks(slab.layout)
        self._channel = channel
        self._windows = [HostWindow(slab, part.heads) for part in parts]

    def write(self, shipment: Shipment) -> bool:
        if shipment.stopped():
            return False
        message, source = shipment.message, shipment.source
        pieces = [piece for window in self._windows for piece in window.read(message.layer, source, shipment.ready)]
        self._channel.send(message, pieces)
        return True

    def settle(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing to undo: what is not sent cannot arrive."""


class TcpIntake:
    transport = "tcp"
    peer_writes = False

    def __init__(self, channel: Channel[ToDecode], slabs: Sequence[RankSlab]) -> None:
        self._channel = channel
        self._slabs = slabs
        self._windows: list[list[HostWindow]] = []  # by part, where it belongs

    def welcome(self, message: Welcome, parts: Sequence[Part]) -> None:
        self._windows = [
            [HostWindow(self._slabs[target.rank], target.heads) for target in part.targets] for part in parts
        ]
        self._channel.send_now(message)

    def await_message(self) -> None:
        """The channel waits by itself."""

    def take(self, layers: range, blocks: Sequence[int]) -> None:
        for layer in layers:
            for first, *_ in self._windows:
                self._channel.receive_into(first.landing(layer, blocks))
            for first, *copies in self._windows:
                for copy in copies:
                    for to, piece in zip(copy.landing(layer, blocks), first.landing(layer, blocks), strict=True):
                        to[:] = piece
                for window in (first, *copies):
                    window.land(layer, blocks)

    def settle(self) -> None:
        """Nothing is on its way between two calls."""

    def await_silence(self, wake_fd: int) -> bool:
        return True

    def close(self) -> None: ...


def tune(sock: socket.socket) -> None:
    """Small messages leave at once, and a host that vanished is noticed though nobody sends."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_TIMEOUT_S * 1000))
