"""The door of a port that has threads behind it: newcomers talk here, in time and few at once, and cost no thread.

A talk is a generator that yields what it waits for, so one thread carries on the talks of all newcomers.
"""

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import structlog

from runtime.errors import BatonError
from runtime.streams.secured_socket import SecuredSocket

MAX_NEWCOMERS: Final = 64  # when one more comes, the one that is here longest leaves
PAUSE_S: Final = 0.1  # after a failure to accept: most likely out of descriptors

T = TypeVar("T")
Talk = Generator[int, None, T]
"""Yields the events of `selectors` that it waits for. Its socket never blocks."""

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Newcomer(Generic[T]):
    sock: socket.socket
    talk: Talk[T]
    leaves_s: float  # when its time is up
    events: int = 0  # that it waits for


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
        self._newcomers: dict[socket.socket, _Newcomer[T]] = {}  # in the order in which they came
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
        for newcomer in [newcomer for newcomer in self._newcomers.values() if newcomer.leaves_s <= now_s]:
            self._turn_away(newcomer, TimeoutError(f"took longer than {self._timeout_s:.1f} s"))
        leaves_s = min((newcomer.leaves_s for newcomer in self._newcomers.values()), default=None)
        for key, _ in self._selector.select(None if leaves_s is None else leaves_s - now_s):
            if key.data is None:
                assert isinstance(key.fileobj, socket.socket)
                self._accept(key.fileobj)
            elif key.fileobj in self._newcomers:
                self._go_on(key.data)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it has left already
            return
        sock.setblocking(False)
        sock = self._secure(sock)
        if len(self._newcomers) >= MAX_NEWCOMERS:
            self._turn_away(next(iter(self._newcomers.values())), TimeoutError("others wait"))
        newcomer = _Newcomer(sock, self._whole_talk(sock), time.monotonic() + self._timeout_s)
        self._newcomers[sock] = newcomer
        self._go_on(newcomer)

    def _whole_talk(self, sock: socket.socket) -> Talk[T]:
        yield from shaken(sock)
        return (yield from self._talk(sock))

    def _go_on(self, newcomer: _Newcomer[T]) -> None:
        try:
            events = next(newcomer.talk)
            if not newcomer.events:
                self._selector.register(newcomer.sock, events, newcomer)
            elif events != newcomer.events:
                self._selector.modify(newcomer.sock, events, newcomer)
            newcomer.events = events
        except StopIteration as done:
            self._forget(newcomer)
            try:
                self._come_in(newcomer.sock, done.value)
            except Exception as error:  # no thread, no memory
                log.error("a connection is dropped", door=self._name, error=str(error) or repr(error))
                newcomer.sock.close()
        except Exception as error:
            self._turn_away(newcomer, error)

    def _turn_away(self, newcomer: _Newcomer[T], error: Exception) -> None:
        self._forget(newcomer)
        newcomer.talk.close()
        newcomer.sock.close()
        report = log.warning if isinstance(error, BatonError) else log.debug
        ours = not isinstance(error, BatonError | OSError)
        (log.error if ours else report)("turned away", door=self._name, error=str(error), exc_info=ours)

    def _forget(self, newcomer: _Newcomer[T]) -> None:
        del self._newcomers[newcomer.sock]
        if newcomer.events:
            self._selector.unregister(newcomer.sock)


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
