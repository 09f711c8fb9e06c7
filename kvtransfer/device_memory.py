"""GPU memory that the engine owns as one range each: the weights, and the slab with the KV blocks.

Everything that will once be unmapped for sleep or exported to a peer is allocated here and nowhere else.
"""

import math

import torch
from torch import Tensor

from baton.errors import UnavailableError
from kvtransfer.layout import SlabLayout

_ALIGNMENT = 256  # bytes


class DeviceMemory:
    """A range of a device's memory that is handed out from front to back and given back as a whole."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Zeroed, because stale bytes that happen to be NaN survive any mask."""
        self.nbytes = nbytes
        self._range = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._used = 0

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next tensor of the range, contiguous and aligned."""
        begin, nbytes = self._used, math.prod(shape) * dtype.itemsize
        assert begin + nbytes <= self.nbytes, "the range was made for what it holds"
        self._used = begin + padded_bytes(nbytes)
        return self._range[begin : begin + nbytes].view(dtype).view(shape)


def padded_bytes(nbytes: int) -> int:
    """What a tensor of `nbytes` takes of a range."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class DeviceSlab:
    """Implements `kvtransfer.slab.Slab` on a GPU. Peers cannot map it yet."""

    generation = 1
    suspended = False

    def __init__(self, layout: SlabLayout, device: torch.device) -> None:
        self.layout = layout
        self._memory = DeviceMemory(padded_bytes(layout.nbytes), device)
        self.tensor = self._memory.tensor(layout.shape, getattr(torch, layout.dtype))

    @property
    def buffer(self) -> memoryview:
        raise UnavailableError("the KV slab lies in GPU memory, which this transport cannot reach")

    def export(self) -> int:
        raise UnavailableError("the KV slab lies in GPU memory, which cannot be exported yet")

    def suspend(self) -> None:
        raise UnavailableError("the KV slab lies in GPU memory, which cannot be suspended yet")

    def resume(self) -> None:
        raise UnavailableError("the KV slab lies in GPU memory, which cannot be suspended yet")

    def close(self) -> None:
        """The memory goes with its last tensor."""
