"""Some heads of a slab's blocks as bytes that the CPU can send, receive and sum up.

The bytes are the slab's own when it lies in host memory, else those of a pinned copy. A window belongs to one thread.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from kvtransfer.slab.byte_runs import byte_ranges
from kvtransfer.slab.slab import Mark, RankSlab, layers_of
from kvtransfer.transports.transport import piece_blocks

if TYPE_CHECKING:
    from torch import Tensor


class HostWindow:
    """Takes at most `piece_blocks` blocks a call. Invariant: what a call returned is void after the next call."""

    def __init__(self, slab: RankSlab, heads: range) -> None:
        self._slab = slab
        self._heads = heads

    @cached_property
    def _staged(self) -> "StagedBlocks | None":
        return None if self._slab.driver.kind == "host" else StagedBlocks(self._slab, self._heads)

    def read(self, layer: int, blocks: Sequence[int], ready: Mark | None = None) -> list[memoryview]:
        """The blocks' bytes in the order of the list, in as few views as possible. Waits until they are computed."""
        if self._staged is not None:
            return [self._staged.read(layer, blocks, ready)]
        return self._own(layer, blocks)

    def landing(self, layer: int, blocks: Sequence[int]) -> list[memoryview]:
        """The views that the blocks' bytes are to be put into before land()."""
        if self._staged is not None:
            return [self._staged.bytes(len(blocks))]
        return self._own(layer, blocks)

    def land(self, layer: int, blocks: Sequence[int]) -> None:
        """Returns when the bytes that were put into landing() are in the slab."""
        if self._staged is not None:
            self._staged.write(layer, blocks)

    def _own(self, layer: int, blocks: Sequence[int]) -> list[memoryview]:
        buffer = self._slab.buffer
        return [buffer[begin:end] for begin, end in byte_ranges(self._slab.layout, layer, blocks, self._heads)]


class StagedBlocks:
    """Some heads of a GPU slab's blocks, copied through pinned memory on a stream of their own."""

    def __init__(self, slab: RankSlab, heads: range) -> None:
        import torch  # here, because a worker whose slab lies in host memory needs no torch

        layout = slab.layout
        self._layout = layout
        # [blocks, heads, 2, block_size, words of a token] of each layer; words, because torch cannot choose rows of
        # each dtype
        self._layers = [layer.view(torch.int32)[:, heads.start : heads.stop] for layer in layers_of(slab.flat, layout)]
        first = self._layers[0]
        self._device, self._is_cuda = first.device, first.is_cuda
        shape = (min(piece_blocks(layout), layout.num_ids), *first.shape[1:])
        self._staging = torch.empty(shape, dtype=first.dtype, pin_memory=self._is_cuda)
        self._stream = torch.cuda.Stream(first.device) if self._is_cuda else None  # type: ignore[no-untyped-call]

    def bytes(self, count: int) -> memoryview:
        import torch

        return self._staging[:count].flatten().view(torch.uint8).numpy().data

    def read(self, layer: int, blocks: Sequence[int], ready: Mark | None) -> memoryview:
        import torch

        with torch.cuda.stream(self._stream):
            if self._stream is not None and ready is not None:
                ready.wait(self._stream)
            self._staging[: len(blocks)].copy_(self._layers[layer].index_select(0, self._places(layer, blocks)))
        return self.bytes(len(blocks))

    def write(self, layer: int, blocks: Sequence[int]) -> None:
        import torch

        with torch.cuda.stream(self._stream):
            values = self._staging[: len(blocks)].to(self._device)
            self._layers[layer].index_copy_(0, self._places(layer, blocks), values)
            if self._stream is not None:
                self._stream.synchronize()

    def _places(self, layer: int, blocks: Sequence[int]) -> "Tensor":
        import torch

        return torch.tensor(blocks, dtype=torch.int64, device=self._device) - self._layout.layer_blocks(layer).start
