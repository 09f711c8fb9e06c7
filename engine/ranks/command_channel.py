"""Commands from rank 0 of a tensor-parallel worker to the other ranks: one writer, many readers, one order for all.

Each reader has a socket for commands and an eventfd on which it counts the commands that it has carried out. Nothing
has a name or a port: readers are child processes that inherit their descriptors. A command may have any size.

The sockets replaced a ring in shared memory, which took half as many lines again. The time from `send` until the last
reader has the command, on two cores, ring and socket: 100 bytes 10 and 10 us with 1 reader, 64 and 64 us with 3; 64 KiB
16 and 25 us, 101 and 116 us; 1 MiB 750 and 215 us, 3.0 and 0.9 ms. With 7 readers a large command keeps the sender
longer, because each reader needs a copy of its own.
"""

import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime.errors import ProtocolError, RankLostError

UNREAD_BYTES = 4 << 20  # that a reader may leave before the writer waits; Linux may grant less (net.core.wmem_max)
SEND_TIMEOUT_S = 30.0
_LOOK_AGAIN_S = 0.1
_LENGTH_BYTES = 8  # little-endian, before each command


class Peer(Protocol):
    """The process of a reader."""

    pidfd: int  # readable once the process has ended

    def lost(self, problem: str | None = None) -> RankLostError:
        """The error with which a worker ends; `problem` None: the process has ended."""


@dataclass(frozen=True, slots=True)
class ReaderEnds:
    """Descriptors that a reader inherits."""

    commands: int  # stream socket
    done: int  # eventfd: number of commands carried out

    def all(self) -> tuple[int, int]:
        return self.commands, self.done


class CommandWriter:
    """Rank 0's end. Thread-safe."""

    def __init__(self, readers: int, unread_bytes: int = UNREAD_BYTES) -> None:
        self.sequence = 0  # number of the last command, from 1 on
        pairs = [socket.socketpair() for _ in range(readers)]
        self._ours = [ours for ours, _ in pairs]
        self._theirs = [theirs for _, theirs in pairs]
        for ours in self._ours:
            ours.setblocking(False)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, unread_bytes)
        self._done_ends = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(readers)]
        self._done = [0] * readers
        self._peers: Sequence[Peer] = ()
        self._sending = threading.Lock()
        self._counting = threading.Lock()  # for `_done`

    def ends(self, reader: int) -> ReaderEnds:
        """The reader's descriptors; the writer closes its copies in `attach`."""
        return ReaderEnds(self._theirs[reader].fileno(), self._done_ends[reader])

    def attach(self, peers: Sequence[Peer]) -> None:
        """Names the readers' processes, which have inherited their ends, before the first command. A wait for one
        reader ends as soon as any of the processes ends."""
        assert len(peers) == len(self._ours)
        self._peers = peers
        for theirs in self._theirs:
            theirs.close()

    def send(self, command: bytes, timeout_s: float = SEND_TIMEOUT_S) -> int:
        """Returns the command's sequence number once all of its bytes are in the sockets. Raises RankLostError when a
        reader ends before that, or makes no room in time."""
        message = memoryview(len(command).to_bytes(_LENGTH_BYTES, "little") + command)
        with self._sending:
            self.sequence += 1
            deadline_s = time.monotonic() + timeout_s
            for reader, ours in enumerate(self._ours):
                rest = message
                while rest:
                    try:
                        rest = rest[ours.send(rest) :]
                    except BlockingIOError:
                        if not self._wait([ours.fileno()], select.POLLOUT, deadline_s):
                            problem = f"has not taken a command within {timeout_s:.1f} s"
                            raise self._peers[reader].lost(problem) from None
                    except (BrokenPipeError, ConnectionResetError):
                        raise self._peers[reader].lost() from None
            return self.sequence

    def wait_done(self, sequence: int, timeout_s: float) -> None:
        """Waits until every reader has carried out that command. Raises RankLostError when a reader ends first, or
        takes longer."""
        deadline_s = time.monotonic() + timeout_s
        while behind := self.behind(sequence):
            if time.monotonic() >= deadline_s:
                raise self._peers[behind[0]].lost(f"has not done command {sequence} within {timeout_s:.1f} s")
            # Another thread in `behind` may take the count, and with it the wake-up.
            look_again_s = min(deadline_s, time.monotonic() + _LOOK_AGAIN_S)
            self._wait([self._done_ends[reader] for reader in behind], select.POLLIN, look_again_s)

    def behind(self, sequence: int) -> list[int]:
        """The readers that have not carried out that command."""
        with self._counting:
            for reader, end in enumerate(self._done_ends):
                try:
                    self._done[reader] += os.eventfd_read(end)
                except BlockingIOError:  # nothing since the last read
                    continue
            return [reader for reader, done in enumerate(self._done) if done < sequence]

    def close(self) -> None:
        """Idempotent. Readers that still run find their sockets at an end."""
        for end in (*self._ours, *self._theirs):
            end.close()
        for done_end in self._done_ends:
            os.close(done_end)
        self._done_ends = []

    def _wait(self, descriptors: list[int], event: int, deadline_s: float) -> bool:
        """Waits for the event on one of the descriptors; False when the time is up. Raises RankLostError when a reader
        has ended."""
        poll = select.poll()
        for descriptor in descriptors:
            poll.register(descriptor, event)
        for peer in self._peers:
            poll.register(peer.pidfd, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, deadline_s - time.monotonic()) * 1e3)}
        for peer in self._peers:
            if peer.pidfd in ready:
                raise peer.lost()
        return bool(ready)


class CommandReader:
    """The end of a rank that inherited `ends`."""

    def __init__(self, ends: ReaderEnds) -> None:
        self._socket = socket.socket(fileno=ends.commands)
        self._done = ends.done

    def receive(self) -> bytearray:
        """Waits for the next command. Raises ProtocolError when the writer has closed."""
        return self._read(int.from_bytes(self._read(_LENGTH_BYTES), "little"))

    def done(self) -> None:
        """Counts the last received command as carried out."""
        os.eventfd_write(self._done, 1)

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        rest = memoryview(data)
        while rest:
            received = self._socket.recv_into(rest, 0, socket.MSG_WAITALL)
            if received == 0:
                raise ProtocolError("rank 0", "closed the command channel")
            rest = rest[received:]
        return data
