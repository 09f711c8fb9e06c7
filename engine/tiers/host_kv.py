"""KV blocks in host memory: a second home for prefixes that the slab has no room for."""

from collections.abc import Sequence

import numpy as np

from kvtransfer.slab.slab import Slab


class HostKv:
    """Implements `engine.core.block_manager.LowerTier` for a slab that lies in this host's memory itself. A slot holds
    one block of all layers. Memory is taken when a slot is first written. Owned by the engine thread."""

    def __init__(self, slab: Slab, nbytes: int) -> None:
        """nbytes: of host memory, in whole blocks."""
        layout = slab.layout
        self.num_slots = nbytes // slot_bytes(slab)
        self._slab = slab
        self._slots = np.empty((self.num_slots, layout.num_layers, layout.block_bytes), dtype=np.uint8)

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        device = self._blocks()
        for block, slot in zip(blocks, slots, strict=True):
            self._slots[slot] = device[:, block]

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        device = self._blocks()
        for slot, block in zip(slots, blocks, strict=True):
            device[:, block] = self._slots[slot]

    def _blocks(self) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
        """The slab as [layers, blocks, bytes of a block in a layer]."""
        layout = self._slab.layout
        return np.frombuffer(self._slab.buffer, np.uint8).reshape(layout.num_layers, layout.num_blocks, -1)


def slot_bytes(slab: Slab) -> int:
    """Bytes of one block in all layers."""
    return slab.layout.num_layers * slab.layout.block_bytes
