"""Listens on the wire between two processes: a TCP proxy on the loopback interface that remembers every byte."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.address import format_address, parse_address


class Tap:
    """Everything that went through, in both directions."""

    def __init__(self, target: str) -> None:
        self._target = parse_address(target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = format_address(*self._listener.getsockname()[:2])
        self._heard: list[bytes] = []
        self._sockets = [self._listener]
        self._closing, self._closed = threading.Lock(), False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def heard(self) -> bytes:
        return b"".join(self._heard)

    def close(self) -> None:
        with self._closing:
            self._closed = True
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                with self._closing:
                    if self._closed:  # while this connection was made
                        near.close()
                        far.close()
                        return
                    self._sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._heard.append(data)
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


@contextmanager
def tapped(target: str) -> Iterator[Tap]:
    tap = Tap(target)
    try:
        yield tap
    finally:
        tap.close()
