"""The memory that holds a worker's KV blocks: one contiguous array that another process may be allowed to write.

The model runner computes on `tensor`; the transports move bytes of `buffer`, or export() the slab.
"""

import itertools
import math
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvtransfer.slab.layout import SlabLayout
from runtime.device.driver import MemoryDriver
from runtime.device.host_memory import HostMemory
from runtime.device.memory_range import MemoryRange
from runtime.errors import UnavailableError

if TYPE_CHECKING:
    import torch


class Mark(Protocol):
    """A moment in a device's work: a CUDA event."""

    def wait(self, stream: Any) -> None:
        """The stream's work that is enqueued from now on comes after the mark."""


class RankSlab(Protocol):
    """Memory for KV blocks that this process maps: its own, or another rank's."""

    layout: SlabLayout
    driver: MemoryDriver

    @property
    def suspended(self) -> bool: ...

    @property
    def buffer(self) -> memoryview: ...

    @property
    def flat(self) -> "torch.Tensor": ...

    def export(self) -> int: ...


class EngineSlab(RankSlab, Protocol):
    """The slab that an engine of this process computes on, or one that an engine shares with it; see `Slab`."""

    @property
    def generation(self) -> int: ...

    def mark(self) -> Mark | None: ...

    def clear_behind(self, block: int, used: int) -> None: ...


class Slab:
    """Invariant: new memory is zeroed, because stale bytes that happen to be NaN survive any mask."""

    def __init__(self, layout: SlabLayout, driver: MemoryDriver | None = None) -> None:
        """`driver` None: the slab lies in this host's memory. Raises UnavailableError when there is not that much."""
        self.layout = layout
        self.driver = driver or HostMemory()
        self._memory = MemoryRange(self.driver, layout.nbytes)
        self._tensor: torch.Tensor | None = None
        self._generation = 1

    @property
    def generation(self) -> int:
        """Rises with every resume(). A grant names it, so a writer of an earlier generation has to ask again."""
        return self._generation

    @property
    def suspended(self) -> bool:
        return not self._memory.is_mapped

    @property
    def tensor(self) -> "torch.Tensor":
        """`[layers, blocks, kv_heads, 2, block_size, head_dim]`, see SlabLayout."""
        return self.flat.view(self.layout.shape)

    @property
    def layers(self) -> "list[torch.Tensor]":
        """`[blocks, kv_heads, 2, block_size, head_dim]` of each layer."""
        return layers_of(self.flat, self.layout)

    @property
    def flat(self) -> "torch.Tensor":
        """All of it, in one dimension."""
        if self._tensor is None:
            import torch  # here, because moving bytes needs no torch

            dtype = getattr(torch, self.layout.dtype)
            self._tensor = self._memory.tensor((self.layout.nbytes // dtype.itemsize,), dtype)
        return self._tensor

    @property
    def buffer(self) -> memoryview:
        """The slab's bytes, for transports that go through host memory. Raises UnavailableError."""
        if self.driver.kind != "host":
            raise UnavailableError("the KV slab lies in GPU memory, which has no bytes here")
        return self._memory.buffer()[: self.layout.nbytes]

    def mark(self) -> Mark | None:
        """The end of what the calling thread has enqueued; None: all of it is done."""
        if self.driver.kind == "host":
            return None
        import torch

        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def clear_behind(self, block: int, used: int) -> None:
        """Zeroes a block behind its `used` tokens, in all layers that have it, before what the calling thread enqueues
        later."""
        if self.layout.window_layers:
            for layer, cache in enumerate(self.layers):
                if block in (blocks := self.layout.layer_blocks(layer)):
                    cache[block - blocks.start, :, :, used:] = 0
        elif self.driver.kind == "host":
            array = np.frombuffer(self.buffer, dtype=np.uint8).reshape(*self.layout.shape[:-1], -1)
            array[:, block, :, :, used:] = 0
        else:
            self.tensor[:, block, :, :, used:] = 0

    def export(self) -> int:
        """A descriptor, the caller's own, that another process maps to write the slab. Raises UnavailableError."""
        return self._memory.export()

    def suspend(self) -> None:
        """Gives the memory back and keeps the addresses. Invariant: no lease is open, and no peer maps the slab."""
        self._memory.unmap()

    def resume(self) -> None:
        """Takes zeroed memory at the same addresses, under a new generation. Raises UnavailableError."""
        self._memory.map()
        self._generation += 1

    def close(self) -> None:
        """Gives the memory back for good, when nobody computes or transfers any more. Idempotent."""
        if self._memory.is_mapped:
            self._memory.unmap()


def layers_of(flat: "torch.Tensor", layout: SlabLayout) -> "list[torch.Tensor]":
    """A slab's values in one dimension -> `[blocks, kv_heads, 2, block_size, head_dim]` of each layer."""
    shapes = list(map(layout.layer_shape, range(layout.num_layers)))
    ends = itertools.accumulate(map(math.prod, shapes))
    return [flat[end - math.prod(shape) : end].view(shape) for shape, end in zip(shapes, ends, strict=True)]
