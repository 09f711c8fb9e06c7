"""TCP: the sending kernel gathers blocks from one slab, the receiving one scatters them into the other.

Only the decode worker's own thread writes its slab here: the end of the connection proves that nobody writes any more.
"""

import socket
from collections.abc import Callable, Sequence

from baton_proto.transfer import Blocks, ToDecode, ToPrefill, Welcome
from kvtransfer.framing import Channel
from kvtransfer.plan import byte_ranges
from kvtransfer.slab import Slab
from kvtransfer.transport import STALL_TIMEOUT_S


class TcpWriter:
    transport = "tcp"

    def __init__(self, channel: Channel[ToPrefill], slab: Slab) -> None:
        self._channel = channel
        self._slab = slab

    def write(
        self, message: Blocks, source: Sequence[int], destination: Sequence[int], stopped: Callable[[], bool]
    ) -> bool:
        if stopped():
            return False
        buffer = self._slab.buffer
        ranges = byte_ranges(self._slab.layout, message.layer, source)
        self._channel.send(message, [buffer[begin:end] for begin, end in ranges])
        return True

    def close(self) -> None:
        """Nothing to undo: what is not sent cannot arrive."""


class TcpIntake:
    transport = "tcp"

    def __init__(self, channel: Channel[ToDecode], slab: Slab) -> None:
        self._channel = channel
        self._slab = slab

    def welcome(self, message: Welcome) -> None:
        self._channel.send_now(message)

    def await_message(self) -> None:
        """The channel waits by itself."""

    def take(self, layer: int, blocks: Sequence[int]) -> None:
        buffer = self._slab.buffer
        self._channel.receive_into([buffer[begin:end] for begin, end in byte_ranges(self._slab.layout, layer, blocks)])

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
