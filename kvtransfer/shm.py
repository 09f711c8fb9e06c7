"""Shared memory: the prefill worker maps the decode worker's slab and writes the blocks where they belong.

With its welcome the decode worker sends two descriptors: the slab, and the write end of a pipe, the *token*. The peer
holds the token exactly as long as its mapping: it closes it after unmapping, and the kernel, which takes a dying
process's memory before its descriptors, closes it otherwise. A closed socket proves nothing here; a hung-up token or an
exited process does.
"""

import fcntl
import mmap
import os
import select
import socket
import struct
from collections.abc import Callable, Sequence

import numpy as np

from baton.errors import ProtocolError
from baton_proto.transfer import Blocks, ToDecode, ToPrefill, Welcome
from kvtransfer.framing import Channel
from kvtransfer.layout import SlabLayout
from kvtransfer.plan import paired_runs
from kvtransfer.slab import Slab

NUM_FDS = 2  # slab, token


class ShmWriter:
    transport = "shm"

    def __init__(self, channel: Channel[ToPrefill], slab: Slab, peer_layout: SlabLayout, fds: list[int]) -> None:
        """Takes the descriptors over. Raises ProtocolError when they are not what a welcome brings."""
        self._channel = channel
        self._layout = slab.layout
        self._peer_layout = peer_layout
        if len(fds) != NUM_FDS:
            _close_all(fds)
            raise ProtocolError(channel.peer, f"sent {len(fds)} file descriptors with its welcome, not {NUM_FDS}")
        slab_fd, self._token = fds
        try:
            self._map = _map_slab(slab_fd, peer_layout.nbytes, channel.peer)
        except BaseException:
            os.close(self._token)
            raise
        finally:
            os.close(slab_fd)
        self._source = np.frombuffer(slab.buffer, dtype=np.uint8)
        self._destination = np.frombuffer(self._map, dtype=np.uint8)

    def write(
        self, message: Blocks, source: Sequence[int], destination: Sequence[int], stopped: Callable[[], bool]
    ) -> bool:
        for run in paired_runs(self._layout, self._peer_layout, message.layer, source, destination):
            if stopped():
                return False
            ours = self._source[run.source : run.source + run.nbytes]
            self._destination[run.destination : run.destination + run.nbytes] = ours  # numpy copies without the GIL
        self._channel.send(message)
        return True

    def close(self) -> None:
        del self._source, self._destination
        self._map.close()
        os.close(self._token)  # only now: it says that the mapping is gone


class ShmIntake:
    transport = "shm"

    def __init__(self, channel: Channel[ToDecode], slab: Slab) -> None:
        self._channel = channel
        self._slab = slab
        self._token = -1
        self._pidfd = _pidfd_of_peer(channel.sock)
        self._news = select.poll()
        self._news.register(channel.sock, select.POLLIN)
        if self._pidfd is not None:
            self._news.register(self._pidfd, select.POLLIN)

    def welcome(self, message: Welcome) -> None:
        self._token, peers_end = os.pipe2(os.O_CLOEXEC)
        try:
            self._channel.send_now(message, [self._slab.export(), peers_end])
        finally:
            os.close(peers_end)

    def await_message(self) -> None:
        """A dead peer's child may hold the socket open, so the process is watched as well."""
        if all(fd != self._channel.sock.fileno() for fd, _ in self._news.poll()):
            raise ConnectionResetError(f"the process of {self._channel.peer} ended")

    def take(self, layer: int, blocks: Sequence[int]) -> None:
        """Nothing to do: the blocks were in place before the message was sent."""

    def await_silence(self, wake_fd: int) -> bool:
        poll = select.poll()
        poll.register(wake_fd, select.POLLIN)
        poll.register(self._token, 0)  # hang-up is always reported
        if self._pidfd is not None:
            poll.register(self._pidfd, select.POLLIN)
        return any(fd != wake_fd for fd, _ in poll.poll())

    def close(self) -> None:
        _close_all([fd for fd in (self._token, self._pidfd) if fd is not None and fd >= 0])
        self._token, self._pidfd = -1, None


def _map_slab(fd: int, nbytes: int, peer: str) -> mmap.mmap:
    """Raises ProtocolError unless the descriptor is a slab of that size that cannot shrink under us."""
    size = os.fstat(fd).st_size
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:
        sealed = 0
    if size != nbytes or not sealed:
        raise ProtocolError(
            peer, f"sent a slab of {size} bytes, sealed: {bool(sealed)}; expected {nbytes}, sealed: True"
        )
    mapping = mmap.mmap(fd, nbytes)
    mapping.madvise(mmap.MADV_DONTFORK)  # a child of ours must not outlive us with leave to write
    return mapping


def _pidfd_of_peer(sock: socket.socket) -> int | None:
    """None when the peer is in a process namespace that we cannot see, or gone; the token is proof enough then."""
    pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except OSError:
        return None


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
