"""Sums over ranks for few rows, where a collective's own time is what counts: the ranks of one host read each other's
memory (engine/kernels/peer_sum.py). `engine/cuda_build.py` makes one where that works.
"""

import os
from typing import Any

import msgspec
import structlog
import torch
from torch import Tensor

from engine.collective import Collective
from engine.kernels.peer_sum import MAX_PROGRAMS, add_peer_sum, flag_bytes

log = structlog.get_logger()

SWITCH = "BATON_PEER_SUM"  # environment: 0 leaves all sums to NCCL, to compare the two
BUFFER_BYTES = {2: 4 << 20, 4: 2 << 20, 8: 1 << 20}  # beyond, NCCL divides the work between the ranks and is faster
_BUFFERS = 2
_CHECK_TURNS = 1 << 20  # a second or two


class PeerSum:
    def __init__(self, segments: Tensor, own: Tensor, rank: int, keep: Any = None) -> None:
        """segments: int64 [ranks] on the device, the addresses of all ranks' segments. own: uint8, ours, of zeros.
        `keep` is what the mappings live by."""
        self._segments = segments
        self._own = own
        self.device = own.device
        self._rank = rank
        self._keep = keep
        self._first = flag_bytes(len(segments))
        self._buffer_bytes = (len(own) - self._first) // _BUFFERS
        self._epochs = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=own.device)
        self._turn = 0

    def buffer(self, like: Tensor) -> Tensor | None:
        """Where a part that is to be added to `like` has to lie, until `add_to`. None: it is too large."""
        if like.nbytes > self._buffer_bytes:
            return None
        return self._own[self._offset : self._offset + like.nbytes].view(like.dtype).view(like.shape)

    def add_to(self, hidden: Tensor, **limits: int) -> None:
        """hidden += the sum of all ranks' buffers. The two buffers take turns: a step, with two sums in each layer,
        begins with the first one, and so do the steps in CUDA graphs."""
        add_peer_sum(hidden, self._segments, self._offset, self._epochs, self._rank, **limits)
        self._turn = (self._turn + 1) % _BUFFERS

    @property
    def _offset(self) -> int:
        return self._first + self._turn * self._buffer_bytes


def make_peer_sum(collective: Collective, device: torch.device, dtype: torch.dtype) -> PeerSum | None:
    """None where ranks cannot read each other's memory, or it was switched off. All ranks get one, or none does."""
    if device.type != "cuda" or os.environ.get(SWITCH) == "0":
        return None
    nbytes = flag_bytes(collective.size) + _BUFFERS * BUFFER_BYTES[collective.size]
    own = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    peer_sum, right, problem = None, False, ""
    everyone = collective.exchange("peer sum", _shared(own))  # after that all flags are zero
    try:
        storages = [
            own.untyped_storage() if rank == collective.rank else _mapped(one, device.index or 0)
            for rank, one in enumerate(everyone)
        ]
        segments = torch.tensor([storage.data_ptr() for storage in storages], dtype=torch.int64, device=device)
        peer_sum = PeerSum(segments, own, collective.rank, storages)
        _compile(own, collective, dtype)
    except Exception as error:
        peer_sum, problem = None, f"{type(error).__name__}: {error}"
    if collective.smallest(peer_sum is not None) and peer_sum is not None:
        right = _is_right(peer_sum, collective, dtype)
    if not collective.smallest(right):
        log.warning("sums over ranks are left to NCCL", problem=problem or "another rank's, or wrong sums")
        return None
    return peer_sum


def _shared(own: Tensor) -> bytes:
    """What another process of this host needs to map it; empty when it cannot be shared."""
    try:
        return msgspec.msgpack.encode(own.untyped_storage()._share_cuda_())  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        log.warning("GPU memory cannot be shared", problem=str(error))
        return b""


def _mapped(shared: bytes, device: int) -> torch.UntypedStorage:
    """Another rank's memory, in the address space of our device."""
    _, *rest, _ = msgspec.msgpack.decode(shared)
    storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(device, *rest, False)  # no event to wait for
    return storage


def _compile(own: Tensor, collective: Collective, dtype: torch.dtype) -> None:
    """The check's kernel, with nobody to wait for: while one rank compiles, the other's patience would end."""
    nowhere = torch.zeros_like(own)
    segments = torch.full((collective.size,), nowhere.data_ptr(), dtype=torch.int64, device=own.device)
    hidden = torch.zeros(1, 1024, dtype=dtype, device=own.device)
    PeerSum(segments, nowhere, collective.rank).add_to(hidden, max_turns=0)
    torch.cuda.synchronize()


def _is_right(peer_sum: PeerSum, collective: Collective, dtype: torch.dtype) -> bool:
    """Whether it finds what NCCL does: in both buffers, for some sizes, so often that it would get out of step."""
    right = True
    for turn, rows in enumerate((1, 3, 40, 1, 77, 2, 5, 1)):
        values = torch.arange(rows * 1024, device=peer_sum.device) % 251
        hidden = (values % 16).to(dtype).view(rows, 1024)
        part = ((values + 7 * collective.rank + turn) % 32).to(dtype).view(rows, 1024)
        expected = hidden.clone()
        collective.add_sum(expected, part.clone())
        buffer = peer_sum.buffer(hidden)
        assert buffer is not None
        buffer.copy_(part)
        peer_sum.add_to(hidden, max_turns=_CHECK_TURNS)
        right = right and torch.equal(hidden, expected)
    return right
