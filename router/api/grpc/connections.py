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
            now = {peer: closing.enter_context(one) for peer, one in _sockets_at(port)}
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


def _sockets_at(port: int) -> Iterator[tuple[Peer, socket.socket]]:
    """Copies of this process's connected sockets at the port. Invariant: what is asked is the copy, because the number
    may belong to something else by now."""
    for number in os.listdir(OPEN_FILES):
        with contextlib.suppress(OSError):
            if not os.readlink(f"{OPEN_FILES}/{number}").startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(number)))
            try:
                here = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockname()[1] == port
                peer = copy.getpeername() if here else None
            except OSError:  # it listens
                peer = None
            if peer is None:
                copy.close()
            else:
                yield (peer[0].removeprefix("::ffff:"), peer[1]), copy


def _peer_of(shown: str) -> Peer:
    """Reads `ipv4:127.0.0.1:80` or `ipv6:%5B::1%5D:80`."""
    host, _, port = unquote(shown).partition(":")[2].rpartition(":")
    return host.strip("[]").removeprefix("::ffff:"), int(port) if port.isdecimal() else 0
