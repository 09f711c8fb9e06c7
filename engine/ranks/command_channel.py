"""What rank 0 of a tensor-parallel worker tells the other ranks: a ring of bytes in shared memory, one writer, many
readers. Every command has a sequence number and reaches every reader; each says when it has done it.

The memory holds nothing but bytes. How many of them there are, how many were taken, and how many commands were done is
counted by eventfds: the kernel wakes who waits, and its reads and writes order the memory on any machine. Nothing has a
name or a port: readers are children that inherit the descriptors. A command of any size goes through in pieces.

`engine/ranks/ranks.py` writes, `engine/ranks/rank_process.py` reads.
"""

import mmap
import os
import select
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime.errors import ProtocolError, RankLostError

RING_BYTES = 4 << 20
SEND_TIMEOUT_S = 30.0  # that a reader may leave the ring full
_LOOK_AGAIN_S = 0.1
_HEADER = struct.Struct("<QQ")  # sequence number, length of what follows


class Peer(Protocol):
    """The process of a reader."""

    pidfd: int  # readable once it has ended

    def lost(self, problem: str | None = None) -> RankLostError:
        """Why a worker cannot go on; `problem` None: it has ended."""
        ...


@dataclass(frozen=True, slots=True)
class ReaderEnds:
    """Descriptors that a reader inherits."""

    memory: int
    written: int  # eventfd: bytes that were written
    taken: int  # bytes that were taken out
    done: int  # commands that were done

    def all(self) -> tuple[int, int, int, int]:
        return self.memory, self.written, self.taken, self.done


class CommandWriter:
    """Any thread may call it."""

    def __init__(self, readers: int, ring_bytes: int = RING_BYTES) -> None:
        self.sequence = 0  # of the last command
        self._size = ring_bytes
        self._memory = os.memfd_create("baton-commands", os.MFD_CLOEXEC)
        os.ftruncate(self._memory, ring_bytes)
        self._map = mmap.mmap(self._memory, ring_bytes)
        no_wait = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        self._ends = [
            ReaderEnds(self._memory, os.eventfd(0), os.eventfd(0, no_wait), os.eventfd(0, no_wait))
            for _ in range(readers)
        ]
        self._peers: list[Peer] = []
        self._written = 0
        self._announced = 0  # bytes that the readers were told of
        self._taken = [0] * readers
        self._done = [0] * readers
        self._sending = threading.Lock()
        self._counting = threading.Lock()  # for `_done`

    def ends(self, reader: int) -> ReaderEnds:
        return self._ends[reader]

    def attach(self, peers: Sequence[Peer]) -> None:
        """The readers' processes, before anything is sent: whoever waits for one notices its end at once."""
        assert len(peers) == len(self._ends)
        self._peers = list(peers)

    def send(self, payload: bytes, timeout_s: float = SEND_TIMEOUT_S) -> int:
        """Returns the command's sequence number, and waits for nothing but room in the ring. Raises RankLostError when
        a reader ends meanwhile, or does not make room in time."""
        with self._sending:
            self.sequence += 1
            deadline_s = time.monotonic() + timeout_s
            for data in (_HEADER.pack(self.sequence, len(payload)), payload):
                rest = memoryview(data)
                while rest:
                    room = self._room(deadline_s, timeout_s)
                    self._put(rest[:room])
                    rest = rest[room:]
            self._announce()
            return self.sequence

    def wait_done(self, sequence: int, timeout_s: float) -> None:
        """Until every reader has done that command. Raises RankLostError when one ends, or takes longer."""
        deadline_s = time.monotonic() + timeout_s
        while behind := self.behind(sequence):
            if time.monotonic() >= deadline_s:
                raise self._peers[behind[0]].lost(f"has not done command {sequence} within {timeout_s:.1f} s")
            # Another thread that asks `behind` may take the count, and the wake-up with it.
            look_again_s = min(deadline_s, time.monotonic() + _LOOK_AGAIN_S)
            self._wait([self._ends[reader].done for reader in behind], look_again_s)

    def behind(self, sequence: int) -> list[int]:
        """The readers that have not done that command."""
        with self._counting:
            for reader, end in enumerate(self._ends):
                self._done[reader] += _take_count(end.done)
            return [reader for reader, done in enumerate(self._done) if done < sequence]

    def close(self) -> None:
        """Idempotent. A reader that is left waits forever."""
        for end in self._ends:
            for descriptor in (end.written, end.taken, end.done):
                os.close(descriptor)
        if self._memory >= 0:
            self._map.close()
            os.close(self._memory)
        self._ends, self._memory = [], -1

    def _put(self, data: memoryview) -> None:
        at = self._written % self._size
        first = min(len(data), self._size - at)
        self._map[at : at + first] = data[:first]
        if first < len(data):
            self._map[: len(data) - first] = data[first:]
        self._written += len(data)

    def _announce(self) -> None:
        """Here and nowhere else the readers hear of bytes: once per command, or per filling of the ring."""
        count, self._announced = self._written - self._announced, self._written
        if count:
            for end in self._ends:
                os.eventfd_write(end.written, count)

    def _room(self, deadline_s: float, timeout_s: float) -> int:
        """Bytes that fit; waits until there is room for one."""
        while (room := self._size - self._written + min(self._taken)) == 0:
            self._announce()
            full = [reader for reader, taken in enumerate(self._taken) if self._written - taken == self._size]
            if not self._wait([self._ends[reader].taken for reader in full], deadline_s):
                raise self._peers[full[0]].lost(f"has not taken a command within {timeout_s:.1f} s")
            for reader, end in enumerate(self._ends):
                self._taken[reader] += _take_count(end.taken)
        return room

    def _wait(self, descriptors: list[int], deadline_s: float) -> bool:
        """Until one of them is readable; False when the time is up. Raises RankLostError when a reader has ended."""
        poll = select.poll()
        for descriptor in (*descriptors, *(peer.pidfd for peer in self._peers)):
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, deadline_s - time.monotonic()) * 1e3)}
        for peer in self._peers:
            if peer.pidfd in ready:
                raise peer.lost()
        return bool(ready)


class CommandReader:
    """Of a process that inherited `ends`."""

    def __init__(self, ends: ReaderEnds) -> None:
        self._ends = ends
        self._size = os.fstat(ends.memory).st_size
        self._map = mmap.mmap(ends.memory, self._size, prot=mmap.PROT_READ)
        self._view = memoryview(self._map)
        self._at = 0
        self._available = 0
        self._untold = 0  # bytes that were taken out and not told the writer
        self._sequence = 0

    def receive(self) -> bytearray:
        """The next command, once it is there. Raises ProtocolError when it is not the one that is due."""
        sequence, length = _HEADER.unpack(self._read(_HEADER.size))
        self._sequence += 1
        if sequence != self._sequence:
            raise ProtocolError("rank 0", f"command {sequence} came where {self._sequence} was due")
        payload = self._read(length)
        self._tell_taken()
        return payload

    def done(self) -> None:
        """The command that was received last has been carried out."""
        os.eventfd_write(self._ends.done, 1)

    def close(self) -> None:
        self._view.release()
        self._map.close()
        for descriptor in self._ends.all():
            os.close(descriptor)

    def _read(self, count: int) -> bytearray:
        data, filled = bytearray(count), 0
        while filled < count:
            if self._available == 0:
                self._tell_taken()
                self._available = os.eventfd_read(self._ends.written)
            size = min(count - filled, self._available, self._size - self._at)
            data[filled : filled + size] = self._view[self._at : self._at + size]
            filled += size
            self._at = (self._at + size) % self._size
            self._available -= size
            self._untold += size
        return data

    def _tell_taken(self) -> None:
        if self._untold:
            os.eventfd_write(self._ends.taken, self._untold)
            self._untold = 0


def _take_count(eventfd: int) -> int:
    """What was counted since it was asked last, 0 if nothing."""
    try:
        return os.eventfd_read(eventfd)
    except BlockingIOError:
        return 0
