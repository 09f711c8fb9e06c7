"""What the block manager asks of memory below the device. engine/tiers/ has it for a CPU and for a GPU."""

from collections.abc import Sequence as Run
from typing import Protocol

from engine.sequences.moves import Move


class LowerTier(Protocol):
    """Memory for blocks that do not fit on the device. Copies of a block or slot are made in the order of the calls;
    None: they are made. Invariant: no step on its way writes or reads the blocks.

    Where layers with a window have places of their own, blocks are the ids of SlabLayout: from the number of blocks on
    they are places. Likewise slots from `num_slots` on are for these. Steps on their way may read a place that is to be
    loaded; the copy comes after them."""

    num_slots: int
    num_window_slots: int
    spare: int  # blocks of the device that are emptied before they are needed, because copies take time

    def store(self, blocks: Run[int], slots: Run[int]) -> Move | None:
        """Copies blocks of the device into slots."""

    def load(self, slots: Run[int], blocks: Run[int]) -> Move | None:
        """Copies slots into blocks of the device."""

    @property
    def block_s(self) -> float:
        """Seconds that a block takes back to the device, by what was measured; 0: nothing was."""

    def load_s(self, num_blocks: int) -> float:
        """Seconds until so many more blocks would be on the device."""

    def close(self) -> None:
        """Gives the memory back. There is no other call after it."""
