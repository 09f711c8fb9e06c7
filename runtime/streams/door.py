"""The door of a port that has threads behind it: newcomers talk here, in time and few at once, and cost no thread.

A talk is a generator that yields what it waits for, so one thread carries on the talks of all newcomers.
"""

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Final, Generic, TypeVar, cast

import structlog

from runtime.errors import BatonError
from runtime.streams.secured_socket import SecuredSocket

MAX_NEWCOMERS: Final = 64  # when one more comes, the one that is here longest leaves
PAUSE_S: Final = 0.1  # after a failure to accept: most likely out of descriptors

T = TypeVar("T")
Talk = Generator[int, None, T]
"""Yields the events of `selectors` that it waits for. Its socket never blocks."""

log = structlog.get_logger()


class Door(Generic[T]):
    """Accepts connections, has a talk with each, and hands it over with the talk's result. `come_in` owns the socket
    then; it runs on the door's thread and must not wait. Whatever fails ends one connection, never the thread."""

    def __init__(
        self,
        name: str,
        listeners: Sequence[socket.socket],
        talk: Callable[[socket.socket], Talk[T]],
        timeout_s: float,
        come_in: Callable[[socket.socket, T], None],
        secure: Callable[[socket.socket], socket.socket] = lambda sock: sock,
    ) -> None:
        """Owns the listeners. `secure` takes over a new socket that does not block, and returns the one to talk on.
        Raises OSError, and RuntimeError when no thread can be started."""
        self._name = name
        self._listeners, self._talk, self._timeout_s, self._come_in = listeners, talk, timeout_s, come_in
        self._secure = secure
        self._newcomers: dict[socket.socket, tuple[Talk[T], float]] = {}  # with the end of their time, the oldest first
        self._closed = False
        self._selector = selectors.DefaultSelector()
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def open(self) -> bool:
        return self._thread.is_alive()

    def close(self, timeout_s: float) -> None:
        """Turns everybody away who has not come in."""
        self._closed = True
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(timeout_s)
        for sock in (*self._listeners, *self._newcomers):
            sock.close()
        self._selector.close()

    def _serve(self) -> None:
        while not self._closed:
            try:
                self._turn()
            except Exception as error:  # Invariant: nothing ends the thread but close()
                if not self._closed:
                    log.error("cannot accept a connection", door=self._name, error=str(error) or repr(error))
                    time.sleep(PAUSE_S)

    def _turn(self) -> None:
        now_s = time.monotonic()
        for sock in [sock for sock, (_, leaves_s) in self._newcomers.items() if leaves_s <= now_s]:
            self._turn_away(sock, TimeoutError(f"took longer than {self._timeout_s:.1f} s"))
        oldest = next(iter(self._newcomers.values()), None)
        for key, _ in self._selector.select(None if oldest is None else oldest[1] - now_s):
            sock = cast(socket.socket, key.fileobj)
            if sock in self._listeners:
                self._accept(sock)
            elif sock in self._newcomers:
                self._go_on(sock)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it has left already
            return
        sock.setblocking(False)
        sock = self._secure(sock)
        if len(self._newcomers) >= MAX_NEWCOMERS:
            self._turn_away(next(iter(self._newcomers)), TimeoutError("others wait"))
        self._selector.register(sock, selectors.EVENT_READ)
        self._newcomers[sock] = (self._whole_talk(sock), time.monotonic() + self._timeout_s)
        self._go_on(sock)

    def _whole_talk(self, sock: socket.socket) -> Talk[T]:
        yield from shaken(sock)
        return (yield from self._talk(sock))

    def _go_on(self, sock: socket.socket) -> None:
        try:
            self._selector.modify(sock, next(self._newcomers[sock][0]))
        except StopIteration as done:
            self._forget(sock)
            try:
                self._come_in(sock, done.value)
            except Exception as error:  # no thread, no memory
                log.error("a connection is dropped", door=self._name, error=str(error) or repr(error))
                sock.close()
        except Exception as error:
            self._turn_away(sock, error)

    def _turn_away(self, sock: socket.socket, error: Exception) -> None:
        self._forget(sock)
        sock.close()
        report = log.warning if isinstance(error, BatonError) else log.debug
        ours = not isinstance(error, BatonError | OSError)
        (log.error if ours else report)("turned away", door=self._name, error=str(error), exc_info=ours)

    def _forget(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self._newcomers[sock]


def listen_tcp(host: str, backlog: int | None = None) -> socket.socket:
    """Listens on a free port. `backlog` None: what the system takes to be right. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=backlog)


def shaken(sock: socket.socket) -> Talk[None]:
    """The TLS handshake of a SecuredSocket."""
    while isinstance(sock, SecuredSocket):
        try:
            return sock.shake_hands()
        except BlockingIOError:
            yield selectors.EVENT_READ


def received(sock: socket.socket, at_most: int) -> Talk[bytes]:
    """What comes next. Raises ConnectionResetError when the peer has left."""
    while True:
        try:
            data = sock.recv(at_most)
        except BlockingIOError:
            yield selectors.EVENT_READ
            continue
        if not data:
            raise ConnectionResetError("the peer has left")
        return data


def sent(sock: socket.socket, data: bytes) -> Talk[None]:
    left = memoryview(data)
    while left:
        try:
            left = left[sock.send(left) :]
        except BlockingIOError:
            yield selectors.EVENT_WRITE


def in_time(sock: socket.socket, talk: Talk[T], timeout_s: float) -> T:
    """Carries a talk on to its end, for a dialer. Raises TimeoutError when that takes longer."""
    leaves_s = time.monotonic() + timeout_s
    sock.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        while True:
            try:
                selector.modify(sock, next(talk))
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            if not selector.select(max(0.0, leaves_s - time.monotonic())):
                raise TimeoutError(f"no answer within {timeout_s:.1f} s")
