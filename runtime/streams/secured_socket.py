"""A socket whose bytes TLS protects, for code that was written for sockets without.

`ssl.SSLSocket` is not for us: a thread of ours reads while others send, which it does not bear, it sends no lists of
views and knows no flags. Here TLS works on memory, under a lock, and the socket below waits, without the lock.
"""

import socket
import ssl
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

RAW_BYTES = 1 << 20  # taken from the network, or given to it, in one call at most
MANY_BYTES = 1 << 16
RECORD_BYTES = 16384 + 256 + 5  # the largest that TLS has (RFC 8446, 5.2)


class SecuredSocket(socket.socket):
    """Takes a connected socket over. One thread at a time receives; of those that send, their own lock lets one in at a
    time. Waits and fails as the socket does: by its timeout, or with BlockingIOError."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server_name: str | None = None) -> None:
        """`server_name`: what the peer has to be called; None: we are the server."""
        timeout_s = sock.gettimeout()
        super().__init__(sock.family, sock.type, sock.proto, sock.detach())
        self.settimeout(timeout_s)
        self._from_peer, self._to_peer = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._from_peer, self._to_peer, server_name is None, server_name)
        self._lock = threading.Lock()
        self._raw = memoryview(bytearray(RAW_BYTES))
        self._unsent, self._unsent_of = memoryview(b""), 0  # what send() has left over, and of how many bytes

    def shake_hands(self) -> None:
        """Shakes hands, before anything else. May be called again after BlockingIOError. Raises OSError, ssl.SSLError
        among them."""
        while True:
            try:
                self._tls.do_handshake()
                return
            except ssl.SSLWantReadError:
                pass
            finally:
                if self._to_peer.pending:
                    super().sendall(self._to_peer.read())
            self._take()

    def recv(self, nbytes: int, flags: int = 0, /) -> bytes:
        data = bytearray(nbytes)
        return bytes(data[: self._fill(memoryview(data), whole=bool(flags & socket.MSG_WAITALL))])

    def recvmsg_into(self, views: Any, ancillary: int = 0, flags: int = 0, /) -> tuple[int, list[Any], int, Any]:
        """Fills all views; fewer when the peer has closed."""
        received = 0
        for view in views:
            filled = self._fill(view, whole=True)
            received += filled
            if filled < view.nbytes:
                break
        return received, [], 0, None

    def sendmsg(self, views: Any, *unused: Any) -> int:
        """Sends the first of the views, and returns how many bytes that were."""
        some = _first(views)
        self.sendall(some)
        return len(some)

    def sendall(self, data: "Buffer", flags: int = 0, /) -> None:
        super().sendall(self._sealed(data), flags)

    def send(self, data: "Buffer", flags: int = 0, /) -> int:
        """Raises BlockingIOError when the peer does not take all of it; who goes on sends the same bytes again."""
        if not self._unsent:
            some = memoryview(data)[:RAW_BYTES]
            self._unsent, self._unsent_of = memoryview(self._sealed(some)), some.nbytes
        self._unsent = self._unsent[super().send(self._unsent, flags) :]
        if self._unsent:
            raise BlockingIOError
        return self._unsent_of

    def _sealed(self, data: "Buffer") -> bytes:
        with self._lock:
            self._tls.write(data)
            return self._to_peer.read()

    def _fill(self, view: memoryview, whole: bool) -> int:
        filled = 0
        while filled < view.nbytes and (whole or not filled):
            with self._lock:
                try:
                    received = int(self._tls.read(view.nbytes - filled, view[filled:]))
                    if not received:  # after the peer's close_notify, and before Python 3.11.4 after any end
                        return filled
                    filled += received
                    continue
                except ssl.SSLWantReadError:
                    pass
                except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    return filled
            self._take(view.nbytes - filled if whole else 0)
        return filled

    def _take(self, needed: int = 0) -> None:
        """Waits for bytes from the network. For many that are `needed`, which are more when sealed, it waits once. A
        part of a record may lie in OpenSSL's own memory."""
        missing = min(needed - self._from_peer.pending - RECORD_BYTES, RAW_BYTES)
        if missing >= MANY_BYTES:
            received = super().recv_into(self._raw, missing, socket.MSG_WAITALL)
        else:
            received = super().recv_into(self._raw)
        with self._lock:
            if received:
                self._from_peer.write(self._raw[:received])
            else:
                self._from_peer.write_eof()


def _first(views: Sequence[memoryview]) -> memoryview | bytes:
    """The first views as one buffer of RAW_BYTES at most: TLS takes 16 KiB at a time, and many views have fewer."""
    if views[0].nbytes * 2 > RAW_BYTES or len(views) == 1:
        return views[0][:RAW_BYTES]
    some, size = [], 0
    for view in views:
        if size + view.nbytes > RAW_BYTES:
            break
        some.append(view)
        size += view.nbytes
    return b"".join(some)
