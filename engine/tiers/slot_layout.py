"""Where blocks lie in host memory: each with all the layers that have it as one run of bytes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtransfer.slab.layout import SlabLayout

Rows = NDArray[np.int64]  # of block_bytes each: a block in one layer


@dataclass(frozen=True, slots=True)
class _Group:
    """Layers that have the same blocks."""

    layers: Rows  # their numbers, ascending
    in_slab: Rows  # the row of each one's first block
    in_host: int  # the row of the first slot
    first_block: int
    first_slot: int

    def slab_rows(self, block: int) -> Rows:
        return self.in_slab + (block - self.first_block)

    def host_rows(self, slot: int) -> slice:
        begin = self.in_host + (slot - self.first_slot) * len(self.layers)
        return slice(begin, begin + len(self.layers))


class SlotLayout:
    """Slots for blocks of a slab. Where layers with a window have blocks of their own, these have slots of their own:
    in the slab's proportion, by the ids that follow on those of the others."""

    def __init__(self, slab: SlabLayout, nbytes: int) -> None:
        """nbytes: of host memory, at most."""
        self.num_slots = nbytes * slab.num_blocks // slab.nbytes
        self.num_window_slots = self.num_slots * slab.num_window_blocks // slab.num_blocks
        self.block_bytes = slab.block_bytes
        sliding = sorted(slab.window_layers)
        others = [layer for layer in range(slab.num_layers) if layer not in slab.window_layers]
        self.slot_bytes, self.window_slot_bytes = (len(some) * slab.block_bytes for some in (others, sliding))
        self.num_rows = self.num_slots * len(others) + self.num_window_slots * len(sliding)
        firsts = (0, 0, 0), (self.num_slots * len(others), slab.num_blocks, self.num_slots)
        self.groups = [
            _Group(np.array(some, np.int64), _first_rows(slab, some), *first)
            for some, first in zip((others, sliding), firsts, strict=True)
        ]

    def group_of(self, slot: int) -> _Group:
        return self.groups[slot >= self.num_slots]

    def host_rows(self, slot: int) -> slice:
        return self.group_of(slot).host_rows(slot)

    def nbytes_of(self, slots: Rows) -> int:
        num_sliding = int((slots >= self.num_slots).sum())
        return (len(slots) - num_sliding) * self.slot_bytes + num_sliding * self.window_slot_bytes

    def rows(self, blocks: Rows, slots: Rows, layers: range) -> tuple[Rows, Rows]:
        """The rows of these blocks in these layers: in the slab, and in their slots, layer by layer."""
        in_slab, in_host = [], []
        for group, chosen in zip(self.groups, (slots < self.num_slots, slots >= self.num_slots), strict=True):
            at = np.flatnonzero((group.layers >= layers.start) & (group.layers < layers.stop))[:, None]
            in_slab.append((group.in_slab[at] + (blocks[chosen] - group.first_block)).ravel())
            in_host.append((group.in_host + (slots[chosen] - group.first_slot) * len(group.layers) + at).ravel())
        return np.concatenate(in_slab), np.concatenate(in_host)


def _first_rows(slab: SlabLayout, layers: list[int]) -> Rows:
    starts = [slab.offset(layer, slab.layer_blocks(layer).start) for layer in layers]
    return np.array(starts, np.int64) // slab.block_bytes


def bytes_of_slots(slab: SlabLayout, num_slots: int) -> int:
    """Host memory for so many slots."""
    return -(-num_slots * slab.nbytes // slab.num_blocks)
