"""Messages on a stream socket: frames of msgpack, each followed by the raw bytes that its message announces.

Both ends use one Channel per connection. One thread reads. On the prefill side one thread sends, and may wait for the
peer; on the decode side any thread may send, and none ever waits.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from baton_proto.transfer import ToDecode, ToPrefill, encode
from runtime.errors import ProtocolError
from runtime.streams.length_prefix import PREFIX_BYTES, body_bytes, framed

MAX_FRAME_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = MAX_FRAME_BYTES - 4096  # of a Commit; the rest of its frame fits into 4 KiB
MAX_VECTORS = 1024  # IOV_MAX of Linux

Incoming = TypeVar("Incoming")


class Channel(Generic[Incoming]):
    """Typed messages over one connected socket, which the channel owns. `peer`: a name for error messages."""

    def __init__(self, sock: socket.socket, decode: Callable[[bytes | bytearray], Incoming], peer: str) -> None:
        self.sock = sock
        self.peer = peer
        self._decode = decode
        self._closing = threading.Lock()  # other threads may still send_now() or shutdown() while the owner closes

    def receive(self) -> Incoming | None:
        """The next message; None when the peer closed between two. Raises ProtocolError, OSError."""
        message, fds = self.receive_with_fds(0)
        assert not fds
        return message

    def receive_with_fds(self, max_fds: int) -> tuple[Incoming | None, list[int]]:
        """The next message like receive(), and the file descriptors that came along, which the caller closes."""
        fds: list[int] = []
        if max_fds:
            head, fds, _, _ = socket.recv_fds(self.sock, PREFIX_BYTES, max_fds, socket.MSG_CMSG_CLOEXEC)
        else:
            head = self.sock.recv(PREFIX_BYTES, socket.MSG_WAITALL)
        if not head:
            return None, fds
        prefix = bytearray(head.ljust(PREFIX_BYTES))
        self.receive_into([memoryview(prefix)[len(head) :]])
        body = bytearray(body_bytes(prefix, MAX_FRAME_BYTES, self.peer))
        self.receive_into([memoryview(body)])
        return decoded(self._decode, body, self.peer), fds

    def receive_into(self, views: Sequence[memoryview]) -> None:
        """Fills the views with raw bytes. Raises OSError when the peer closes before they are full."""
        left = [view for view in views if view.nbytes]
        while left:
            received = self.sock.recvmsg_into(left[:MAX_VECTORS], 0, socket.MSG_WAITALL)[0]
            if received == 0:
                raise ConnectionResetError(f"{self.peer} closed the connection in mid-message")
            left = _after(left, received)

    def send(self, message: ToDecode, views: Sequence[memoryview] = ()) -> None:
        """Sends a message and raw bytes behind it. Waits as long as the socket's send timeout. Raises OSError."""
        left = [memoryview(framed(encode(message))), *views]
        while left:
            try:
                sent = self.sock.sendmsg(left[:MAX_VECTORS])
            except BlockingIOError:
                raise TimeoutError(f"{self.peer} takes no bytes") from None
            left = _after(left, sent)

    def send_now(self, message: ToPrefill, fds: Sequence[int] = ()) -> None:
        """Sends a message without waiting. Raises OSError, also when the peer does not read what it is sent."""
        frame = framed(encode(message))
        with self._closing:
            if fds:
                sent = socket.send_fds(self.sock, [frame], list(fds), socket.MSG_DONTWAIT)
            else:
                sent = self.sock.send(frame, socket.MSG_DONTWAIT)
        if sent < len(frame):
            raise TimeoutError(f"{self.peer} does not read")

    def shutdown(self) -> None:
        """Ends the connection for both sides and wakes threads that wait in it. Idempotent, any thread."""
        with self._closing, contextlib.suppress(OSError):  # the peer has ended it already
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """After the last thread has left receive() and send()."""
        with self._closing:
            self.sock.close()


def decoded(decode: Callable[[bytes | bytearray], Incoming], body: bytes | bytearray, peer: str) -> Incoming:
    """Raises ProtocolError."""
    try:
        return decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(peer, f"sent a message that is none of ours: {error}") from error


def _after(views: list[memoryview], moved: int) -> list[memoryview]:
    """The views without their first `moved` bytes."""
    for index, view in enumerate(views):
        if moved < view.nbytes:
            return [view[moved:], *views[index + 1 :]]
        moved -= view.nbytes
    return []
