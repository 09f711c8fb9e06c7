"""A communicator of two GPUs in two processes, of one host or of two: a prefill rank's GPU and a decode worker's.

nccl4py, NVIDIA's own binding, sets a communicator up without blocking, says how far the set-up is, and aborts it. cupy
sets communicators up blocking (its NcclConfig knows `split_share` alone), so a peer that dies in mid-handshake would
hold a thread for ever; torch's process groups want a store of their own, and watchdog threads. NCCL says nothing of a
peer that dies later either: a kernel of ours waits on the GPU until somebody aborts it. So every wait here watches the
connection to the peer, too.

A call of a communicator that does not block starts a thread for every send, which takes 60 us where a blocking call
takes 13 us. So the communicator is split: calls of the child block, and the child's set-up, a call of its parent, does
not. The child shares the connections over which the parent has said hello, so none of its calls waits for the peer.

https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html#fault-tolerance
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/comms.html#ncclcommsplit
"""

import select
import socket
import time
from collections.abc import Callable

import torch
from nccl import core as nccl
from nccl.bindings import nccl as bindings
from nccl.bindings.nccl import NCCLError, Result

from runtime.errors import UnavailableError

SENDER, RECEIVER = range(2)

_SPIN_S = 1e-3  # a transfer on its way takes less, or much more
_NAP_S = 2e-4


def new_pair_id() -> bytes:
    """The id that both ends of a pair must have. It names an address of this process, where NCCL lets them meet."""
    return bytes(nccl.get_unique_id())


class PeerWatch:
    """Waits for an event that needs the peer, and watches the connection to the peer meanwhile, which any thread may
    read."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self._peer = peer
        self._poll = select.poll()
        self._poll.register(sock, select.POLLRDHUP)  # hang-up and errors are always reported

    def until(self, is_done: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Raises ConnectionResetError when the peer is gone, or TimeoutError; both are OSErrors."""
        began_s = time.monotonic()
        while not is_done():
            waited_s = time.monotonic() - began_s
            if timeout_s is not None and waited_s > timeout_s:
                raise TimeoutError(f"{self._peer} did not take part in a transfer for {timeout_s:.1f} s")
            if self._poll.poll(0):
                raise ConnectionResetError(f"{self._peer} is gone")
            time.sleep(0 if waited_s < _SPIN_S else _NAP_S)


class NcclPair:
    """One end of the pair. One thread makes it and calls it, with the GPU of this end as its current device."""

    def __init__(self, pair_id: bytes, rank: int, watch: PeerWatch, timeout_s: float) -> None:
        """Meets the other end. Raises OSError when it does not come, UnavailableError when NCCL cannot connect."""
        self._peer = 1 - rank
        self._watch = watch
        self._timeout_s = timeout_s
        self._parent, self._child = nccl.Communicator(), nccl.Communicator()
        try:
            self._parent.initialize(
                2, rank, nccl.UniqueId.from_bytes(pair_id), nccl.NCCLConfig(blocking=False, split_share=True)
            )
            self._settle()
            self._say_hello(rank)
            self._child = self._parent.split(0, rank, nccl.NCCLConfig(blocking=True))
            self._settle()
        except BaseException as error:
            self.abort()
            if isinstance(error, NCCLError):
                raise UnavailableError(f"NCCL: {error}") from error
            raise
        self._calls = bindings.Comm(self._child.ptr)

    def send(self, address: int, nbytes: int, stream: torch.cuda.Stream) -> None:
        """Enqueues a send; the peer has to receive equally many bytes. Raises UnavailableError."""
        self._enqueue(bindings.send, address, nbytes, stream)

    def receive(self, address: int, nbytes: int, stream: torch.cuda.Stream) -> None:
        """Enqueues a receive, in which the GPU waits: call it when the peer has begun to send."""
        self._enqueue(bindings.recv, address, nbytes, stream)

    def abort(self) -> None:
        """Ends what is on its way on this GPU, whatever the peer does. Idempotent."""
        self._child.abort()
        self._parent.abort()
        self._child.abort()  # a child that was in the making exists only now

    def _enqueue(self, call: Callable[..., None], address: int, nbytes: int, stream: torch.cuda.Stream) -> None:
        """Calls the bindings, because `Communicator` takes longer to look at tensor and stream than the call takes."""
        try:
            call(address, nbytes, nccl.UINT8, self._peer, self._calls, stream.cuda_stream)
            state = bindings.comm_get_async_error(self._calls)
        except NCCLError as error:
            raise UnavailableError(f"NCCL: {error}") from error
        if state != Result.Success:
            raise UnavailableError(f"NCCL: {Result(state).name}")

    def _say_hello(self, rank: int) -> None:
        """Sends one byte, because NCCL connects two GPUs when the first bytes go from one to the other."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            values = torch.zeros(1, dtype=torch.uint8, device="cuda")
        if rank == SENDER:
            self._parent.send(values, self._peer, stream=stream)
        else:
            self._parent.recv(values, self._peer, stream=stream)
        self._settle()
        self._watch.until(stream.query, self._timeout_s)

    def _settle(self) -> None:
        """Waits for the parent. Neither the parent nor a stream that it was given may be used while it is busy."""
        self._watch.until(lambda: self._state() != Result.InProgress, self._timeout_s)
        if (state := self._state()) != Result.Success:
            raise UnavailableError(f"NCCL: {Result(state).name}")

    def _state(self) -> int:
        return int(self._parent.get_async_error())
