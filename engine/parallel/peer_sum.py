"""Sums over ranks for few rows, where a collective's own time dominates: the ranks of one host read each other's memory
(engine/kernels/peer_sum.py).
"""

import os
from typing import Any

import torch
from torch import Tensor

from engine.kernels.peer_sum import MAX_PROGRAMS, add_peer_sum, flag_bytes, flagged_room
from engine.kernels.stream_flag import FOREVER
from engine.parallel.collective import Collective
from engine.parallel.peer_memory import CHECK_TURNS, SWITCH, built_by_all, mapped_by_all

# By number of ranks.
BUFFER_BYTES = {2: 4 << 20, 4: 2 << 20, 8: 1 << 20}  # larger parts: NCCL divides the work between the ranks, faster
FLAGGED_BYTES = {2: 256 << 10, 4: 64 << 10, 8: 32 << 10}  # parts up to this size are sent with flags in them
_TURNS = 2
_CHECK_ROWS = (1, 3, 200, 40, 1, 201, 77, 2, 5, 1)


class PeerSum:
    def __init__(
        self, segments: Tensor, own: Tensor, rank: int, buffer_bytes: int, flagged_bytes: int, keep: Any = None
    ) -> None:
        """segments: int64 [ranks] on the device, the addresses of all ranks' segments. own: this rank's segment, uint8
        [segment_bytes], zero at first. keep: the objects that keep the mappings alive."""
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
        """Memory for the part that `finish` adds to `like`, of the same shape and type; None when it is too large."""
        if like.nbytes > self._buffer_bytes:
            return None
        begin = self._buffers + self._turn * self._buffer_bytes
        return self._own[begin : begin + like.nbytes].view(like.dtype).view(like.shape)

    def finish(
        self, hidden: Tensor, norm: Tensor | None = None, eps: float = 0.0, max_turns: int = FOREVER
    ) -> Tensor | None:
        """hidden [rows, size] += the sum of all ranks' buffers. With `norm`, weights [size], the RMS norm of the result
        is returned. Invariant: each step begins with the first of the two turns, also in CUDA graphs, because every
        layer has two sums."""
        part = self.buffer(hidden)
        assert part is not None
        segments, turn = self._segments, self._turn
        self._turn = (turn + 1) % _TURNS
        offset, epochs, flagged = self._buffers + turn * self._buffer_bytes, self._epochs[1], dict[str, Any]()
        words_of_4 = hidden.shape[1] * hidden.element_size() % 4 == 0
        if hidden.nbytes <= self._flagged_bytes and len(hidden) <= MAX_PROGRAMS and words_of_4:
            room = flagged_room(len(segments), self._flagged_bytes)
            offset, epochs = self._buffers + _TURNS * self._buffer_bytes + turn * room, self._epochs[0]
            flagged = {"part": part, "part_bytes": self._flagged_bytes}
        return add_peer_sum(hidden, segments, offset, epochs, self._rank, norm, eps, max_turns, **flagged)

    @property
    def _buffers(self) -> int:
        return flag_bytes(len(self._segments))


def segment_bytes(ranks: int, buffer_bytes: int, flagged_bytes: int) -> int:
    """Bytes of a rank's segment, flags, then buffers, then words, for parts up to `buffer_bytes` and flagged parts up
    to `flagged_bytes`."""
    return flag_bytes(ranks) + _TURNS * (buffer_bytes + flagged_room(ranks, flagged_bytes))


def make_peer_sum(collective: Collective, device: torch.device, dtype: torch.dtype, hidden_size: int) -> PeerSum | None:
    """Built by all ranks or by none: None on a CPU, when the environment switches it off (SWITCH), or when the ranks
    cannot read each other's memory."""
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
    """Compiles the check's kernels without waiting for a peer, because a wait would time out while a peer compiles."""
    segments = torch.full((size,), nowhere.data_ptr(), dtype=torch.int64, device=nowhere.device)
    peer_sum = PeerSum(segments, nowhere, 0, *sizes)
    for rows in _CHECK_ROWS:
        hidden = torch.zeros(rows, hidden_size, dtype=dtype, device=nowhere.device)
        if peer_sum.buffer(hidden) is not None:
            peer_sum.finish(hidden, max_turns=0)
    torch.cuda.synchronize()


def _is_right(peer_sum: PeerSum, collective: Collective, dtype: torch.dtype, hidden_size: int) -> bool:
    """Whether the sums equal NCCL's, for several sizes, in all of the memory, often enough to notice a lost step."""
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
