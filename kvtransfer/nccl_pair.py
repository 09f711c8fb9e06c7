"""A communicator of two GPUs in two processes, of one host or of two: a prefill rank's, and a decode worker's.

By nccl4py, NVIDIA's own binding: it sets a communicator up without blocking, says how far it is, and aborts it. cupy's
communicators are set up blocking (its NcclConfig knows `split_share` alone), so a peer that dies in mid-handshake would
hold a thread for ever; torch's process groups want a store of their own, and watchdog threads. Of a peer that dies
later NCCL says nothing either: a kernel of ours then waits on the GPU until somebody aborts it. So every wait here
looks at the connection beside it.

https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html#fault-tolerance
"""

import select
import socket
import time
from collections.abc import Callable

import torch
from nccl import core as nccl
from nccl.bindings.nccl import NCCLError, Result
from torch import Tensor

from baton.errors import UnavailableError

SENDER, RECEIVER = range(2)

_SPIN_S = 1e-3  # what is on its way takes less, or much more
_NAP_S = 2e-4


def new_pair_id() -> bytes:
    """What both ranks of a pair must have. It names an address of this process, where NCCL lets them meet."""
    return bytes(nccl.get_unique_id())


class PeerWatch:
    """Waits for what needs the peer, and for the connection to it at the same time. Any thread may read the latter."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self._peer = peer
        self._poll = select.poll()
        self._poll.register(sock, select.POLLRDHUP)  # hang-up and errors are always reported

    def until(self, is_done: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Raises ConnectionResetError when the peer is gone, TimeoutError; both are OSErrors."""
        began_s = time.monotonic()
        while not is_done():
            waited_s = time.monotonic() - began_s
            if timeout_s is not None and waited_s > timeout_s:
                raise TimeoutError(f"{self._peer} did not take part in a transfer for {timeout_s:.1f} s")
            if self._poll.poll(0):
                raise ConnectionResetError(f"{self._peer} is gone")
            time.sleep(0 if waited_s < _SPIN_S else _NAP_S)


class NcclPair:
    """One end. Used by one thread, on the device that is current in it."""

    def __init__(self, pair_id: bytes, rank: int, watch: PeerWatch, timeout_s: float) -> None:
        """Meets the other end. Raises OSError when it does not come, UnavailableError when NCCL cannot connect them."""
        self._peer = 1 - rank
        self._watch = watch
        self._timeout_s = timeout_s
        self._communicator = nccl.Communicator()
        try:
            config = nccl.NCCLConfig(blocking=False)
            self._communicator.initialize(2, rank, nccl.UniqueId.from_bytes(pair_id), config)
            self._settle()
            self._say_hello(rank)
        except BaseException as error:
            self.abort()
            if isinstance(error, NCCLError):
                raise UnavailableError(f"NCCL: {error}") from error
            raise

    def send(self, values: Tensor, stream: torch.cuda.Stream) -> None:
        """Enqueues it; the peer has to receive as many bytes. Raises OSError, UnavailableError."""
        self._communicator.send(values, self._peer, stream=stream)
        self._settle()

    def receive(self, values: Tensor, stream: torch.cuda.Stream) -> None:
        """Enqueues it. The GPU waits for the peer, so call it when the peer has begun to send."""
        self._communicator.recv(values, self._peer, stream=stream)
        self._settle()

    def abort(self) -> None:
        """Ends what is on its way, on this GPU, whatever the peer does. Idempotent."""
        self._communicator.abort()

    def _say_hello(self, rank: int) -> None:
        """NCCL connects the two when something first goes from one to the other."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            values = torch.zeros(1, dtype=torch.uint8, device="cuda")
        if rank == SENDER:
            self.send(values, stream)
        else:
            self.receive(values, stream)
        self._watch.until(stream.query, self._timeout_s)

    def _settle(self) -> None:
        """Nothing may be asked of the communicator, nor of its stream, while it is busy with what it was asked."""
        self._watch.until(lambda: self._state() != Result.InProgress, self._timeout_s)
        if (state := self._state()) != Result.Success:
            raise UnavailableError(f"NCCL: {Result(state).name}")

    def _state(self) -> int:
        return int(self._communicator.get_async_error())
