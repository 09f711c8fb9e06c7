"""What shm and cuda_ipc share: the prefill worker maps the decode worker's slabs, in host memory or on a GPU.

With its Welcome the decode worker sends descriptors: the slabs that the peer has to write, and the write end of a pipe,
the *token*. Invariant: the peer holds the token exactly as long as its mappings. It closes the token after unmapping;
when it dies, the kernel takes its memory before its descriptors. So a hung-up token or an exited process proves that
the peer cannot write any more, and a closed socket proves nothing.
"""

import os
import select
import socket
import struct
from collections.abc import Sequence

from baton_proto.transfer import Welcome
from kvtransfer.slab.head_plan import SIZES, Part
from kvtransfer.transports.transport import BlockIntake, DecodeEnd
from runtime.device.driver import MemoryDriver
from runtime.device.memory_range import PeerRange
from runtime.errors import ProtocolError

MAX_FDS = SIZES[-1] + 1  # slabs, token


class PeerSlabs:
    """Slabs of the decode worker, mapped by the prefill worker: one for each target of `parts`, in the same order."""

    def __init__(self, driver: MemoryDriver, fds: list[int], parts: Sequence[Part], nbytes: int, peer: str) -> None:
        """Takes the descriptors over; `nbytes`: of each slab. Raises ProtocolError when they are not what is due."""
        expected = sum(len(part.targets) for part in parts) + 1
        if len(fds) != expected:
            _close_all(fds)
            raise ProtocolError(peer, f"sent {len(fds)} file descriptors with its welcome, not {expected}")
        *slab_fds, self._token = fds
        self.memories: list[PeerRange] = []
        try:
            for fd in slab_fds:
                self.memories.append(PeerRange(driver, fd, nbytes, peer))
        except BaseException:
            self.close()
            raise
        finally:
            _close_all(slab_fds)

    def close(self) -> None:
        for memory in self.memories:
            memory.close()
        os.close(self._token)  # last, because it says that the mappings are gone


class MappedIntake(BlockIntake):
    """Takes nothing: the blocks are in place before they are announced."""

    peer_writes = True

    def __init__(self, end: DecodeEnd) -> None:
        self._channel = end.channel
        self._slabs = end.slabs
        self._token = -1
        self._pidfd = _pidfd_of_peer(end.channel.sock)
        self._news = select.poll()
        self._news.register(end.channel.sock, select.POLLIN)
        if self._pidfd is not None:
            self._news.register(self._pidfd, select.POLLIN)

    def welcome(self, message: Welcome, parts: Sequence[Part]) -> None:
        fds: list[int] = []
        try:
            fds.extend(self._slabs[target.rank].export() for part in parts for target in part.targets)
            self._token, peers_end = os.pipe2(os.O_CLOEXEC)
            fds.append(peers_end)
            self._channel.send_now(message, fds)
        finally:
            _close_all(fds)

    def await_message(self) -> None:
        """Because a dead peer's child may hold the socket open, the peer's process is watched as well."""
        if all(fd != self._channel.sock.fileno() for fd, _ in self._news.poll()):
            raise ConnectionResetError(f"the process of {self._channel.peer} ended")

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


def _pidfd_of_peer(sock: socket.socket) -> int | None:
    """The peer's process; None when it is gone or in a namespace that we cannot see: then the token is proof enough."""
    pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except OSError:
        return None


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
