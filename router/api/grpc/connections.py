"""The connections of gRPC clients, of which those that have shown nothing are closed when places run short.

gRPC accepts connections in native code, up to a limit, and shows them to nobody. So they are looked up among the open
files of this process: the sockets at the gRPC port.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Final
from urllib.parse import unquote

import structlog

from runtime.sparing import Sparing

LOOK_S: Final = 0.25
LOOK_SHARE: Final = 0.05  # of the time goes into looks, at most
CROWDED: Final = 0.75  # share of the places from which on connections are closed, down to
CALM: Final = 0.5
OPEN_FILES: Final = "/proc/self/fd"

Peer = tuple[str, int]  # address and port

log = structlog.get_logger()
spare = Sparing(lines=1)


class GrpcConnections:
    """A connection is closed the sooner the longer it has made no call that asks for text or for something of the
    service; while such a call runs it is not."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._running: Counter[Peer] = Counter()  # calls
        self._ended: dict[Peer, None] = {}  # peers with a call that has ended, the latest last
        self._open: dict[Peer, None] = {}  # at the last look, the oldest first

    @contextlib.contextmanager
    def call(self, shown_peer: str) -> Iterator[None]:
        """`shown_peer`: as gRPC has it."""
        peer = _peer_of(shown_peer)
        self._running[peer] += 1
        try:
            yield
        finally:
            self._running[peer] -= 1
            if not self._running[peer]:
                del self._running[peer]
            self._ended.pop(peer, None)
            self._ended[peer] = None

    def leave(self, port: int) -> None:
        """Who connects from now on reaches another process that listens on the port, or none."""
        for peer, one in _sockets_at(port):
            with one:
                if peer is None:
                    one.shutdown(socket.SHUT_RDWR)

    def any_at(self, port: int) -> bool:
        for peer, one in _sockets_at(port):
            one.close()
            if peer is not None:
                return True
        return False

    async def watch(self, port: int) -> None:
        pause_s = LOOK_S
        while True:
            await asyncio.sleep(pause_s)
            began_s = time.monotonic()
            if len(os.listdir(OPEN_FILES)) > CROWDED * self._places:
                await asyncio.to_thread(self._look, port)
            pause_s = max(LOOK_S, (time.monotonic() - began_s) / LOOK_SHARE)

    def _look(self, port: int) -> None:
        with contextlib.ExitStack() as closing:
            copies = [(peer, closing.enter_context(one)) for peer, one in _sockets_at(port)]
            now = {peer: one for peer, one in copies if peer is not None}
            self._open = {peer: None for peer in (*self._open, *now) if peer in now}
            self._ended = {peer: None for peer in self._ended if peer in now}
            if len(now) <= CROWDED * self._places:
                return
            silent = [peer for peer in self._open if peer not in self._ended]
            idle = [peer for peer in (*silent, *self._ended) if peer not in self._running]
            surplus = idle[: len(now) - int(CALM * self._places)]
            for peer in surplus:
                with contextlib.suppress(OSError):  # it has left
                    now[peer].shutdown(socket.SHUT_RDWR)
            reason = f"{len(now)} of {self._places} places are taken"
            spare(log.warning, "idle gRPC connections are closed", reason=reason, closed=len(surplus))


def _sockets_at(port: int) -> Iterator[tuple[Peer | None, socket.socket]]:
    """Copies of this process's sockets at the port: those with a peer, and those that listen, with None. Invariant:
    what is asked is the copy, because the number may belong to something else by now."""
    for number in os.listdir(OPEN_FILES):
        with contextlib.suppress(OSError):
            if not os.readlink(f"{OPEN_FILES}/{number}").startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(number)))
            peer = None
            try:
                here = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockname()[1] == port
                if here and not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    address = copy.getpeername()
                    peer = address[0].removeprefix("::ffff:"), address[1]
            except OSError:  # it is closed
                here = False
            if here:
                yield peer, copy
            else:
                copy.close()


def _peer_of(shown: str) -> Peer:
    """Reads `ipv4:127.0.0.1:80` or `ipv6:%5B::1%5D:80`."""
    host, _, port = unquote(shown).partition(":")[2].rpartition(":")
    return host.strip("[]").removeprefix("::ffff:"), int(port) if port.isdecimal() else 0
