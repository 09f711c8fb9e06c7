"""CUDA memory of one host: a kernel writes a layer's blocks over NVLink into the decode worker's slab, see mapped.py.

Writing is asynchronous: a kernel waits on a stream of its own for the layer to be computed, and its blocks are
announced when it has ended. So the engine never waits for the link, and the link's thread only when it is idle.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton_proto.transfer import Blocks, ToPrefill
from engine.kernels.copy_blocks import BlockCopy
from kvtransfer.cuda_memory import CudaMemory
from kvtransfer.framing import Channel
from kvtransfer.layout import SlabLayout
from kvtransfer.mapped import PeerSlab
from kvtransfer.slab import Mark, Slab
from kvtransfer.transport import MAX_PIECE_BLOCKS

_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    message: Blocks
    written: torch.cuda.Event
    table: Tensor  # the kernel reads it


class CudaIpcWriter:
    """Implements `kvtransfer.transport.BlockWriter`."""

    transport = "cuda_ipc"
    piece_blocks = MAX_PIECE_BLOCKS

    def __init__(self, channel: Channel[ToPrefill], slab: Slab, peer_layout: SlabLayout, fds: list[int]) -> None:
        """Takes the descriptors over. Raises ProtocolError when they are not what a welcome brings, UnavailableError
        when this GPU cannot reach the memory."""
        assert isinstance(slab.driver, CudaMemory)
        self._channel = channel
        self._device = slab.driver.device
        self._peer = PeerSlab(slab.driver, fds, peer_layout.nbytes, channel.peer)
        torch.cuda.set_device(self._device)  # of this thread, and so is the stream: nobody else writes here
        self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self._stream)
        source = _words(slab.tensor.flatten().view(torch.uint8), slab.layout)
        destination = _words(torch.as_tensor(self._peer.memory.array, device=self._device), peer_layout)
        self._copy: BlockCopy | None = BlockCopy(source, destination)
        self._on_their_way: deque[_OnItsWay] = deque()
        self._blocks: tuple[Sequence[int], Sequence[int]] = ((), ())
        self._table = torch.empty(2, 0, dtype=torch.int32, device=self._device)

    def write(
        self,
        message: Blocks,
        source: Sequence[int],
        destination: Sequence[int],
        ready: Mark | None,
        stopped: Callable[[], bool],
    ) -> bool:
        assert self._copy is not None
        if stopped():
            return False
        written = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        table = self._table_of(source, destination)
        if ready is not None:
            ready.wait(self._stream)
        self._copy(message.layer, table)
        written.record(self._stream)
        self._on_their_way.append(_OnItsWay(message, written, table))
        while self._on_their_way and self._on_their_way[0].written.query():  # type: ignore[no-untyped-call]
            self._announce()
        return True

    def settle(self) -> bool:
        if not self._on_their_way:
            return False
        self._on_their_way[0].written.synchronize()
        self._announce()
        return True

    def close(self) -> None:
        self._stream.synchronize()
        self._on_their_way.clear()
        self._copy = None
        self._peer.close()

    def _announce(self) -> None:
        self._channel.send(self._on_their_way[0].message)
        self._on_their_way.popleft()

    def _table_of(self, source: Sequence[int], destination: Sequence[int]) -> Tensor:
        """int32 [2, count] on the device; the layers of a chunk share one."""
        if self._blocks != (source, destination):
            host = torch.tensor([source, destination], dtype=torch.int32, pin_memory=True)
            self._table = host.to(self._device, non_blocking=True)
            self._blocks = (source, destination)
        return self._table


def _words(memory: Tensor, layout: SlabLayout) -> Tensor:
    """uint8 [nbytes and more] -> int64 [layers, blocks, words of a block]"""
    words = memory[: layout.nbytes].view(torch.int64)
    return words.view(layout.num_layers, layout.num_blocks, layout.block_bytes // _WORD_BYTES)
