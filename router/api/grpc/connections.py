"""The connections of gRPC clients, of which those that have shown nothing are closed when places or memory run short.

gRPC accepts connections in native code, up to a limit, and shows them to nobody. So they are looked up among the open
files of this process: the sockets at the gRPC port. Until a client has agreed to the server's settings, gRPC holds
heads of 16 MiB, which it shows to nobody, either; but the system knows how many bytes have come.
"""

import contextlib
import ctypes
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote

import structlog

from runtime.fair_queue import one_less
from runtime.sparing import Sparing

LOOK_S: Final = 0.025
SHARE: Final = 0.05  # of the time goes into counting connections, at most, and as much into returning memory
CROWDED: Final = 0.75  # share of the places from which on connections are closed, down to
CALM: Final = 0.5
GROWN_BYTES: Final = 8 << 20  # of this process, from which on what connections have sent is looked at
ALERT_S: Final = 1.0  # looks go on after a closing, because heads may fill what was freed, and nothing grows
UNSEEN_BYTES: Final = 16 << 20  # of heads that no call has come of, and what surrounds messages
BUFFER_BYTES: Final = 256 << 10  # that the system keeps of a connection: all of it is read also behind its end
FRAMES_BYTES: Final = 1024  # of a call, around its head and a message
RECEIVED: Final = struct.Struct("@128xQ")  # tcpi_bytes_received of struct tcp_info in linux/tcp.h
OPEN_FILES: Final = "/proc/self/fd"

Peer = tuple[str, int]  # address and port

log = structlog.get_logger()
spare = Sparing(lines=1)


class GrpcConnections:
    """For want of places a connection is closed the sooner the longer it has made no call that asks for text or for
    something of the service; while such a call runs it is not. `message_bytes`: of messages that are read at once, over
    all connections. When more have come that nobody has read, or heads alone are more than they should be, those with
    most of them are closed."""

    def __init__(self, places: int, message_bytes: int) -> None:
        self._places = places
        self._unread_bytes = message_bytes + UNSEEN_BYTES
        self._memory_bytes = _memory_bytes()  # at the last look, or less
        self._alert_until_s = self._count_at_s = self._return_at_s = 0.0  # monotonic
        self._stopped = threading.Event()
        self._open: dict[Peer, None] = {}  # at the last look, the oldest first
        self._lock = threading.Lock()  # of what follows, which calls and looks change
        self._read: Counter[Peer] = Counter()  # bytes, of messages and about their heads
        self._running: Counter[Peer] = Counter()  # calls
        self._reading: Counter[Peer] = Counter()  # messages
        self._ended: dict[Peer, None] = {}  # peers with a call that has ended, the latest last

    @contextlib.contextmanager
    def call(self, shown_peer: str) -> Iterator[None]:
        """`shown_peer`: as gRPC has it."""
        peer = _peer_of(shown_peer)
        try:
            with self._one_more(self._running, peer):
                yield
        finally:
            with self._lock:
                self._ended.pop(peer, None)
                self._ended[peer] = None

    def reading(self, shown_peer: str) -> contextlib.AbstractContextManager[None]:
        """A message, of a call of its own or of a stream."""
        return self._one_more(self._reading, _peer_of(shown_peer))

    def has_read(self, shown_peer: str, num_bytes: int) -> None:
        """Of a message, and of the head of its call."""
        with self._lock:
            self._read[_peer_of(shown_peer)] += num_bytes + FRAMES_BYTES

    @contextlib.contextmanager
    def _one_more(self, counts: Counter[Peer], peer: Peer) -> Iterator[None]:
        with self._lock:
            counts[peer] += 1
        try:
            yield
        finally:
            with self._lock:
                one_less(counts, peer)

    def leave(self, port: int) -> None:
        """Who connects from now on reaches another process that listens on the port, or none."""
        for found in _sockets_at(port):
            if found.peer is None:
                _end(found)

    def any_at(self, port: int) -> bool:
        return any(found.peer is not None for found in _sockets_at(port))

    def bound_buffers(self, port: int) -> None:
        """Of the connections that come from now on. To be called while the port is open. Raises OSError."""
        for found in _sockets_at(port):
            if found.peer is None:  # those that it accepts inherit this
                with _borrowed(found.number) as listener:
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)

    def watch(self, port: int) -> None:
        """Looks until `stop`, in a thread of its own, because a busy event loop would put off the looks."""
        while not self._stopped.wait(LOOK_S):
            with contextlib.suppress(OSError):  # no file may be opened: the next look may find a free one
                self._look_in_time(port)

    def stop(self) -> None:
        self._stopped.set()

    def _look_in_time(self, port: int) -> None:
        began_s = time.monotonic()
        self._memory_bytes = min(self._memory_bytes, memory_bytes := _memory_bytes())
        is_alert = memory_bytes >= self._memory_bytes + GROWN_BYTES or began_s < self._alert_until_s
        counts = began_s >= self._count_at_s
        if is_alert or (counts and len(os.listdir(OPEN_FILES)) > CROWDED * self._places):
            self._look(port)
        if counts:
            self._count_at_s = began_s + (time.monotonic() - began_s) / SHARE
        if is_alert:
            if began_s >= self._return_at_s:
                self._return_at_s = began_s + _return_freed() / SHARE
            self._memory_bytes = _memory_bytes()

    def _look(self, port: int) -> None:
        """Invariant: the lock is not held while files are looked through, because calls wait for the lock."""
        now = {found.peer: found for found in _sockets_at(port) if found.peer is not None}
        self._open = {peer: None for peer in (*self._open, *now) if peer in now}
        with self._lock:
            self._ended = {peer: None for peer in self._ended if peer in now}
            self._read = Counter({peer: count for peer, count in self._read.items() if peer in now})
            self._close_fullest(now)
            if len(now) > CROWDED * self._places:
                self._close_idle(now)

    def _close_idle(self, now: dict[Peer, "_Found"]) -> None:
        silent = [peer for peer in self._open if peer not in self._ended]
        idle = [peer for peer in (*silent, *self._ended) if peer not in self._running]
        surplus = idle[: len(now) - int(CALM * self._places)]
        for peer in surplus:
            _end(now[peer])
        reason = f"{len(now)} of {self._places} places are taken"
        spare(log.warning, "idle gRPC connections are closed", reason=reason, closed=len(surplus))

    def _close_fullest(self, now: dict[Peer, "_Found"]) -> None:
        """While a connection's messages are not read, all that comes over it is heads."""
        unread = {peer: max(0, found.received - self._read[peer]) for peer, found in now.items()}
        heads = {peer: count for peer, count in unread.items() if peer not in self._reading}
        surplus = {*_fullest(heads, UNSEEN_BYTES, UNSEEN_BYTES // 8)}  # far down, because gRPC takes time to close
        left = {peer: count for peer, count in unread.items() if peer not in surplus}
        surplus |= {*_fullest(left, self._unread_bytes, self._unread_bytes)}
        for peer in surplus:
            _end(now[peer])
        if surplus:
            self._alert_until_s = time.monotonic() + ALERT_S
            spare(log.warning, "gRPC connections are closed that send what no call reads", closed=len(surplus))


def _return_freed() -> float:
    """What gRPC's threads have freed goes to the system, because each of them keeps its own for itself (glibc).
    Returns the seconds of a core that it took."""
    began_s = time.thread_time()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
    return time.thread_time() - began_s


def _fullest(counts: dict[Peer, int], limit: int, goal: int) -> Iterator[Peer]:
    """None within the limit; else those without which the counts add up to the goal at most."""
    total = sum(counts.values())
    for peer in sorted(counts, key=lambda peer: -counts[peer]) if total > limit else ():
        if total <= goal:
            return
        total -= counts[peer]
        yield peer


class _Found(NamedTuple):
    """A socket of this process at the port."""

    number: int  # of the open file
    peer: Peer | None  # None: it listens
    received: int  # bytes since it connected; 0 where the system does not say


def _sockets_at(port: int) -> Iterator[_Found]:
    for number in map(int, os.listdir(OPEN_FILES)):
        with contextlib.suppress(OSError):  # it is closed
            found = _at(port, number) if os.readlink(f"{OPEN_FILES}/{number}").startswith("socket:") else None
            if found is not None:
                yield found


def _at(port: int, number: int) -> _Found | None:
    """Raises OSError."""
    with _borrowed(number) as one:
        here = _address(one.getsockname())
        if here is None or here[1] != port:
            return None
        peer = _connected(one)
        found = _Found(number, peer, 0 if peer is None else _received_bytes(one))
        return found if _connected(one) == peer else None  # the number belongs to another one by now


@contextlib.contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """The file itself and no copy: after gRPC has closed its own, the system would tell it what becomes of the copy,
    and gRPC take it for news of the connection that it has in that place by then, and close that one."""
    one = socket.socket(fileno=number)
    try:
        yield one
    finally:
        one.detach()


def _end(found: _Found) -> None:
    with contextlib.suppress(OSError), _borrowed(found.number) as one:  # it has left
        if _connected(one) == found.peer:
            one.shutdown(socket.SHUT_RDWR)


def _connected(one: socket.socket) -> Peer | None:
    if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return None
    return _address(one.getpeername())


def _address(shown: object) -> Peer | None:
    """As a socket has it; None: it is no connection of the Internet, and may have the number of one that was."""
    match shown:
        case (str(host), int(port), *_):
            return host.removeprefix("::ffff:"), port
    return None


def _memory_bytes() -> int:
    """Of this process, resident."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _received_bytes(one: socket.socket) -> int:
    """Since it connected; 0 where the system does not say."""
    with contextlib.suppress(OSError, struct.error):
        (received,) = RECEIVED.unpack(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED.size))
        return int(received)
    return 0


def _peer_of(shown: str) -> Peer:
    """Reads `ipv4:127.0.0.1:80` or `ipv6:%5B::1%5D:80`."""
    host, _, port = unquote(shown).partition(":")[2].rpartition(":")
    return host.strip("[]").removeprefix("::ffff:"), int(port) if port.isdecimal() else 0
