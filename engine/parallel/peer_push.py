"""Sums of two ranks over many rows: each copies its part into the other's memory, and both add the two in one order.

The GPUs' copy engines move the parts, so the matrix products that run meanwhile keep all multiprocessors, of which
NCCL's kernels would take some; with two ranks the bytes on the link are the same. Copies land in slots that take turns.
"""

import itertools
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.stream_flag import FOREVER, set_flag, wait_for_flag
from engine.parallel.collective import Collective
from engine.parallel.peer_memory import CHECK_TURNS, SWITCH, built_by_all, mapped_by_all
from engine.parallel.sharded_operations import PIECE_ROWS, PIECES, OnItsWay

# Invariant: a layer has at most PIECES sums begun and not finished. A rank that begins sum n has therefore passed the
# wait of sum n - PIECES, which the peer began after it had finished sum n - 2 * PIECES: that sum's slot is free.
SLOTS = 2 * PIECES
_ALIGNMENT = 256
_FLAG_WORDS = _ALIGNMENT // 4
_NUMBERS = 1 << 30  # numbers of sums, before they repeat


class PeerPush:
    def __init__(self, own: Tensor, peer: Tensor, collective: Collective) -> None:
        """own: this rank's memory, uint8 [push_bytes], zero at first. peer: the other rank's memory, mapped here."""
        self._own, self._peer = _Slots(own), _Slots(peer)
        self._rank = collective.rank
        self._collective = collective
        self._numbers = itertools.cycle(range(1, _NUMBERS))
        self._turns = itertools.cycle(range(SLOTS))
        self._link = torch.cuda.Stream(own.device, priority=-1)  # type: ignore[no-untyped-call]
        self._max_turns = FOREVER

    def begin_sum(self, part: Tensor) -> OnItsWay:
        """Begins a sum like Collective.begin_sum(), which takes parts that are too large for a slot."""
        if part.nbytes > self._own.slot_bytes:
            return self._collective.begin_sum(part)
        slot, number = next(self._turns), next(self._numbers)
        self._link.wait_stream(torch.cuda.current_stream())
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._link):
            self._peer.slot(slot, part).copy_(part, non_blocking=True)
            set_flag(self._peer.flag(slot), number)
            copied.record()
        theirs = self._own.slot(slot, part)
        both = (part, theirs) if self._rank == 0 else (theirs, part)
        return _Pushed(both, self._own.flag(slot), number, copied, self._max_turns)

    def check(self, dtype: torch.dtype, hidden_size: int) -> bool:
        """Whether the sums equal NCCL's in all slots. Every rank calls it."""
        right = True
        self._max_turns = CHECK_TURNS
        for turn in range(2 * SLOTS + 1):
            values = torch.arange((turn + 1) * hidden_size, device=self._own.device) % 61
            part = (values + 7 * self._rank + turn).to(dtype).view(-1, hidden_size)
            expected = self._collective.sum(part.clone())
            first, second = self.begin_sum(part).parts()
            right = torch.equal(first + second, expected) and right
        self._max_turns = FOREVER
        return right


@dataclass(frozen=True, slots=True)
class _Pushed:
    """Implements `OnItsWay`."""

    both: tuple[Tensor, Tensor]  # by rank
    flag: Tensor
    number: int
    copied: torch.cuda.Event
    max_turns: int

    def parts(self) -> tuple[Tensor, ...]:
        wait_for_flag(self.flag, self.number, self.max_turns)
        torch.cuda.current_stream().wait_event(self.copied)  # from here on this rank's part may be written again
        return self.both


class _Slots:
    def __init__(self, segment: Tensor) -> None:
        self.device = segment.device
        self.slot_bytes = (len(segment) - SLOTS * _FLAG_WORDS * 4) // SLOTS
        self._flags = segment[: SLOTS * _FLAG_WORDS * 4].view(torch.int32).view(SLOTS, _FLAG_WORDS)
        self._slots = segment[SLOTS * _FLAG_WORDS * 4 :].view(SLOTS, self.slot_bytes)

    def flag(self, index: int) -> Tensor:
        return self._flags[index, :1]

    def slot(self, index: int, like: Tensor) -> Tensor:
        return self._slots[index, : like.nbytes].view(like.dtype).view(like.shape)


def push_bytes(max_rows: int, row_bytes: int) -> int:
    """Bytes of a rank's memory for steps of `max_rows` rows of `row_bytes`."""
    most = max(min(max_rows, 2 * PIECE_ROWS), -(-max_rows // PIECES))  # rows in one piece
    slot_bytes = -(-most * row_bytes // _ALIGNMENT) * _ALIGNMENT
    return SLOTS * (slot_bytes + _FLAG_WORDS * 4)


def make_peer_push(
    collective: Collective, device: torch.device, dtype: torch.dtype, max_rows: int, hidden_size: int
) -> PeerPush | None:
    """Built by both ranks or by neither: None when there are not two ranks, when they cannot write each other's memory,
    or when the environment switches it off (SWITCH)."""
    if device.type != "cuda" or collective.size != 2 or max_rows < PIECE_ROWS or os.environ.get(SWITCH) == "0":
        return None
    own = torch.zeros(push_bytes(max_rows, hidden_size * dtype.itemsize), dtype=torch.uint8, device=device)

    def build() -> PeerPush:
        everyone = mapped_by_all(own, collective, "peer push")
        flag = torch.zeros(1, dtype=torch.int32, device=device)
        set_flag(flag, 1)  # compiles now, because the check's wait would time out while a peer compiles
        wait_for_flag(flag, 1)
        return PeerPush(own, everyone[1 - collective.rank], collective)

    def is_right(push: PeerPush) -> bool:
        return push.check(dtype, hidden_size)

    return built_by_all(collective, build, is_right, "sums over ranks of many rows")
