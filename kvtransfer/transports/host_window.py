"""Some heads of blocks of a slab as bytes that the CPU can send, receive and sum up.

They are the slab's own where it lies in host memory, else a pinned copy. Each thread that needs a window makes its own.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from kvtransfer.slab.adopted_slab import RankSlab
from kvtransfer.slab.byte_runs import byte_ranges
from kvtransfer.slab.slab import Mark
from kvtransfer.transports.transport import piece_blocks

if TYPE_CHECKING:
    from torch import Tensor


class HostWindow:
    """At most one piece (see transport.py) at a time; what a call returned is void with the next one."""

    def __init__(self, slab: RankSlab, heads: range) -> None:
        self._slab = slab
        self._heads = heads

    @cached_property
    def _staged(self) -> "StagedBlocks | None":
        return None if self._slab.driver.kind == "host" else StagedBlocks(self._slab, self._heads)

    def read(self, layer: int, blocks: Sequence[int], ready: Mark | None = None) -> list[memoryview]:
        """The blocks' bytes in the order of the list, as few pieces as can be. Waits until they are computed."""
        if self._staged is not None:
            return [self._staged.read(layer, blocks, ready)]
        return self._own(layer, blocks)

    def landing(self, layer: int, blocks: Sequence[int]) -> list[memoryview]:
        """Where the blocks' bytes are to be put, before `land`."""
        if self._staged is not None:
            return [self._staged.bytes(len(blocks))]
        return self._own(layer, blocks)

    def land(self, layer: int, blocks: Sequence[int]) -> None:
        """What was put into `landing` is in the slab when it returns."""
        if self._staged is not None:
            self._staged.write(layer, blocks)

    def _own(self, layer: int, blocks: Sequence[int]) -> list[memoryview]:
        buffer = self._slab.buffer
        return [buffer[begin:end] for begin, end in byte_ranges(self._slab.layout, layer, blocks, self._heads)]


class StagedBlocks:
    """Some heads of blocks of a slab on a device, copied through pinned memory on a stream of its own."""

    def __init__(self, slab: RankSlab, heads: range) -> None:
        import torch  # here, because workers whose slab lies in host memory need none of it

        layout = slab.layout
        self._tensor = slab.tensor[:, :, heads.start : heads.stop]  # [layers, blocks, heads, 2, block_size, head_dim]
        self._is_cuda = self._tensor.is_cuda
        shape = (min(piece_blocks(layout), layout.num_blocks), *self._tensor.shape[2:])
        self._staging = torch.empty(shape, dtype=self._tensor.dtype, pin_memory=self._is_cuda)
        self._stream = torch.cuda.Stream(self._tensor.device) if self._is_cuda else None  # type: ignore[no-untyped-call]

    def bytes(self, count: int) -> memoryview:
        import torch

        return self._staging[:count].flatten().view(torch.uint8).numpy().data

    def read(self, layer: int, blocks: Sequence[int], ready: Mark | None) -> memoryview:
        import torch

        with torch.cuda.stream(self._stream):
            if self._stream is not None and ready is not None:
                ready.wait(self._stream)
            self._staging[: len(blocks)].copy_(self._tensor[layer].index_select(0, self._places(blocks)))
        return self.bytes(len(blocks))

    def write(self, layer: int, blocks: Sequence[int]) -> None:
        import torch

        with torch.cuda.stream(self._stream):
            values = self._staging[: len(blocks)].to(self._tensor.device)
            self._tensor[layer].index_copy_(0, self._places(blocks), values)
            if self._stream is not None:
                self._stream.synchronize()

    def _places(self, blocks: Sequence[int]) -> "Tensor":
        import torch

        return torch.tensor(blocks, dtype=torch.int64, device=self._tensor.device)
