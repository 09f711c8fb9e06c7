"""TCP: the sending kernel gathers blocks from one slab, the receiving one scatters them into the others.

Only the decode worker's own thread writes its slabs here: the end of the connection proves that nobody writes any more.
"""

import socket
from collections.abc import Callable, Sequence

from baton_proto.transfer import Blocks, ToDecode, ToPrefill, Welcome
from kvtransfer.adopted_slab import RankSlab
from kvtransfer.framing import Channel
from kvtransfer.head_plan import Part
from kvtransfer.plan import byte_ranges
from kvtransfer.slab import Slab
from kvtransfer.transport import STALL_TIMEOUT_S


class TcpWriter:
    transport = "tcp"

    def __init__(self, channel: Channel[ToPrefill], slab: Slab, parts: Sequence[Part]) -> None:
        self._channel = channel
        self._slab = slab
        self._parts = parts

    def write(
        self, message: Blocks, source: Sequence[int], destination: Sequence[int], stopped: Callable[[], bool]
    ) -> bool:
        if stopped():
            return False
        views: list[memoryview] = []
        for part in self._parts:
            views += _views(self._slab, message.layer, source, part.heads)
        self._channel.send(message, views)
        return True

    def close(self) -> None:
        """Nothing to undo: what is not sent cannot arrive."""


class TcpIntake:
    transport = "tcp"

    def __init__(self, channel: Channel[ToDecode], slabs: Sequence[RankSlab]) -> None:
        self._channel = channel
        self._slabs = slabs
        self._parts: Sequence[Part] = ()

    def welcome(self, message: Welcome, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._channel.send_now(message)

    def await_message(self) -> None:
        """The channel waits by itself."""

    def take(self, layer: int, blocks: Sequence[int]) -> None:
        places = [
            [_views(self._slabs[target.rank], layer, blocks, target.heads) for target in part.targets]
            for part in self._parts
        ]
        self._channel.receive_into([view for first, *_ in places for view in first])
        for first, *copies in places:
            for copy in copies:
                for to, view in zip(copy, first, strict=True):
                    to[:] = view

    def await_silence(self, wake_fd: int) -> bool:
        return True

    def close(self) -> None: ...


def _views(slab: RankSlab, layer: int, blocks: Sequence[int], heads: range) -> list[memoryview]:
    buffer = slab.buffer
    return [buffer[begin:end] for begin, end in byte_ranges(slab.layout, layer, blocks, heads)]


def tune(sock: socket.socket) -> None:
    """Small messages leave at once, and a host that vanished is noticed though nobody sends."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_TIMEOUT_S * 1000))
