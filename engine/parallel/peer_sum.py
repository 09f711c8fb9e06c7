"""Sums over ranks for few rows, where a collective's own time is what counts: the ranks of one host read each other's
memory (engine/kernels/peer_sum.py). `engine/cuda/cuda_build.py` makes one where that works.
"""

import os
from typing import Any

import torch
from torch import Tensor

from engine.kernels.peer_sum import MAX_PROGRAMS, add_flagged_sum, add_peer_sum, flag_bytes, flagged_room
from engine.parallel.collective import Collective
from engine.parallel.peer_memory import CHECK_TURNS, SWITCH, built_by_all, mapped_by_all

BUFFER_BYTES = {2: 4 << 20, 4: 2 << 20, 8: 1 << 20}  # beyond, NCCL divides the work between the ranks and is faster
FLAGGED_BYTES = {2: 256 << 10, 4: 64 << 10, 8: 32 << 10}  # up to here parts are sent with flags in them
_TURNS = 2
_CHECK_ROWS = (1, 3, 200, 40, 1, 201, 77, 2, 5, 1)


class PeerSum:
    def __init__(
        self, segments: Tensor, own: Tensor, rank: int, buffer_bytes: int, flagged_bytes: int, keep: Any = None
    ) -> None:
        """segments: int64 [ranks] on the device, the addresses of all ranks' segments. own: uint8, ours, of zeros, as
        many as `segment_bytes`. `keep` is what the mappings live by."""
        self._segments = segments
        self._own = own
        self.device = own.device
        self._rank = rank
        self._keep = keep
        self._buffer_bytes = buffer_bytes
        self._flagged_bytes = flagged_bytes
        self._epochs = torch.zeros(2, MAX_PROGRAMS, dtype=torch.int32, device=own.device)
        self._turn = 0

    def buffer(self, like: Tensor) -> Tensor | None:
        """Where a part that is to be added to `like` has to lie, until `finish`. None: it is too large."""
        if like.nbytes > self._buffer_bytes:
            return None
        begin = self._buffers + self._turn * self._buffer_bytes
        return self._own[begin : begin + like.nbytes].view(like.dtype).view(like.shape)

    def finish(self, hidden: Tensor, norm: Tensor | None = None, eps: float = 0.0, **limits: int) -> Tensor | None:
        """hidden [rows, size] += the sum of all ranks' buffers. With `norm`, weights [size], the RMS norm of the result
        comes back. The memory in between takes turns: a step, with two sums in each layer, begins with the first one,
        and so do the steps in CUDA graphs."""
        part = self.buffer(hidden)
        assert part is not None
        segments, turn = self._segments, self._turn
        self._turn = (turn + 1) % _TURNS
        words_of_4 = hidden.shape[1] * hidden.element_size() % 4 == 0
        if hidden.nbytes <= self._flagged_bytes and len(hidden) <= MAX_PROGRAMS and words_of_4:
            ranks = len(segments)
            offset = self._buffers + _TURNS * self._buffer_bytes + turn * flagged_room(ranks, self._flagged_bytes)
            epochs = self._epochs[0]
            return add_flagged_sum(
                hidden, part, segments, offset, self._flagged_bytes, epochs, self._rank, norm, eps, **limits
            )
        offset = self._buffers + turn * self._buffer_bytes
        return add_peer_sum(hidden, segments, offset, self._epochs[1], self._rank, norm, eps, **limits)

    @property
    def _buffers(self) -> int:
        return flag_bytes(len(self._segments))


def segment_bytes(ranks: int, buffer_bytes: int, flagged: int) -> int:
    """What a rank shares, for parts up to `buffer_bytes`, of which those up to `flagged` are sent with flags in them:
    flags, then buffers, then words."""
    return flag_bytes(ranks) + _TURNS * (buffer_bytes + flagged_room(ranks, flagged))


def make_peer_sum(collective: Collective, device: torch.device, dtype: torch.dtype, hidden_size: int) -> PeerSum | None:
    """None where ranks cannot read each other's memory, or it was switched off. All ranks get one, or none does."""
    if device.type != "cuda" or os.environ.get(SWITCH) == "0":
        return None
    size, sizes = collective.size, (BUFFER_BYTES[collective.size], FLAGGED_BYTES[collective.size])
    own = torch.zeros(segment_bytes(size, *sizes), dtype=torch.uint8, device=device)

    def build() -> PeerSum:
        everyone = mapped_by_all(own, collective, "peer sum")
        segments = torch.tensor([one.data_ptr() for one in everyone], dtype=torch.int64, device=device)
        _compile(torch.zeros_like(own), size, sizes, dtype, hidden_size)
        return PeerSum(segments, own, collective.rank, *sizes, everyone)

    def is_right(peer_sum: PeerSum) -> bool:
        return _is_right(peer_sum, collective, dtype, hidden_size)

    return built_by_all(collective, build, is_right, "sums over ranks of few rows")


def _compile(nowhere: Tensor, size: int, sizes: tuple[int, int], dtype: torch.dtype, hidden_size: int) -> None:
    """The check's kernels, with nobody to wait for: while one rank compiles, the other's patience would end."""
    segments = torch.full((size,), nowhere.data_ptr(), dtype=torch.int64, device=nowhere.device)
    peer_sum = PeerSum(segments, nowhere, 0, *sizes)
    for rows in _CHECK_ROWS:
        hidden = torch.zeros(rows, hidden_size, dtype=dtype, device=nowhere.device)
        if peer_sum.buffer(hidden) is not None:
            peer_sum.finish(hidden, max_turns=0)
    torch.cuda.synchronize()


def _is_right(peer_sum: PeerSum, collective: Collective, dtype: torch.dtype, hidden_size: int) -> bool:
    """Whether it finds what NCCL does: in all of its memory, for some sizes, so often that it would get out of step."""
    right = True
    for turn, rows in enumerate(_CHECK_ROWS):
        values = torch.arange(rows * hidden_size, device=peer_sum.device) % 251
        hidden = (values % 16).to(dtype).view(rows, hidden_size)
        part = ((values + 7 * collective.rank + turn) % 16).to(dtype).view(rows, hidden_size)
        expected = hidden + collective.sum(part.clone())
        buffer = peer_sum.buffer(hidden)
        if buffer is None:  # a large model's rows
            continue
        buffer.copy_(part)
        peer_sum.finish(hidden, max_turns=CHECK_TURNS)
        right = right and torch.equal(hidden, expected)
    return right
