"""CUDA memory of one host: a layer's blocks go over NVLink straight into the decode worker's slabs, see mapped.py.

Writing is asynchronous: on a stream of its own it waits for the layer to be computed, and the blocks are announced when
it has ended. So the engine never waits for the link, and the link's thread only when it is idle.

Long runs of blocks go by the GPU's copy engines, which leave its processors to the model; many short ones by a kernel,
because a copy engine takes 4 us a run. (While a kernel occupies a processor, a matrix product that wants all of them
takes twice as long: 90 us a layer and chunk of 2,048 tokens, for a copy of 25. See benchmarks/disaggregation.py.)
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton_proto.transfer import Blocks, ToPrefill
from engine.kernels.copy_blocks import copy_blocks
from kvtransfer.cuda_memory import CudaMemory
from kvtransfer.framing import Channel
from kvtransfer.head_plan import Part
from kvtransfer.layout import SlabLayout
from kvtransfer.mapped import PeerSlabs
from kvtransfer.plan import Run, paired_runs
from kvtransfer.slab import Mark, Slab
from kvtransfer.transport import MAX_PIECE_BLOCKS

_WORD_BYTES = 8
_LONG_RUN_BYTES = 512 << 10  # on average; a copy engine then moves 90 GB/s and more


@dataclass(frozen=True, slots=True)
class _Route:
    """Which heads go to which of the decode worker's ranks; int64 [layers, blocks, words of the heads in a block]."""

    source: Tensor
    destination: Tensor
    our_heads: range
    their_heads: range


@dataclass(frozen=True, slots=True)
class _Way:
    """How the blocks of a chunk are copied; its layers share one."""

    source: Sequence[int]
    destination: Sequence[int]
    runs: list[Run]  # of layer 0, if they are long
    table: Tensor | None  # int32 [2, count] on the device, if they are not


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    message: Blocks
    written: torch.cuda.Event
    way: _Way  # the kernel reads its table


class CudaIpcWriter:
    """Implements `kvtransfer.transport.BlockWriter`."""

    transport = "cuda_ipc"
    piece_blocks = MAX_PIECE_BLOCKS

    def __init__(
        self,
        channel: Channel[ToPrefill],
        slab: Slab,
        peer_layout: SlabLayout,
        parts: Sequence[Part],
        fds: list[int],
    ) -> None:
        """Takes the descriptors over. Raises ProtocolError when they are not what a welcome brings, UnavailableError
        when this GPU cannot reach the memory."""
        assert isinstance(slab.driver, CudaMemory)
        self._channel = channel
        self._driver, self._layout, self._peer_layout = slab.driver, slab.layout, peer_layout
        self._peer = PeerSlabs(slab.driver, fds, parts, peer_layout.nbytes, channel.peer)
        torch.cuda.set_device(self._driver.device)  # of this thread, and so is the stream: nobody else writes here
        self._stream = torch.cuda.Stream(self._driver.device, priority=-1)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self._stream)
        ours = slab.tensor.flatten().view(torch.uint8)
        targets = [(part.heads, target.heads) for part in parts for target in part.targets]
        self._routes: list[_Route] = []
        for (our_heads, their_heads), memory in zip(targets, self._peer.memories, strict=True):
            theirs = torch.as_tensor(memory.array, device=self._driver.device)
            source, destination = _words(ours, slab.layout, our_heads), _words(theirs, peer_layout, their_heads)
            self._routes.append(_Route(source, destination, our_heads, their_heads))
        self._on_their_way: deque[_OnItsWay] = deque()
        self._way = _Way((), (), [], torch.empty(2, 0, dtype=torch.int32, device=self._driver.device))
        self._copy(self._way, 0)  # loads the kernel before somebody waits for it

    def write(
        self,
        message: Blocks,
        source: Sequence[int],
        destination: Sequence[int],
        ready: Mark | None,
        stopped: Callable[[], bool],
    ) -> bool:
        if stopped():
            return False
        if self._way.source is not source or self._way.destination != destination:
            self._way = self._way_of(source, destination)
        if ready is not None:
            ready.wait(self._stream)
        self._copy(self._way, message.layer)
        written = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        written.record(self._stream)
        self._on_their_way.append(_OnItsWay(message, written, self._way))
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
        self._routes.clear()
        self._peer.close()

    def _announce(self) -> None:
        self._channel.send(self._on_their_way[0].message)
        self._on_their_way.popleft()

    def _way_of(self, source: Sequence[int], destination: Sequence[int]) -> _Way:
        if len(self._routes) == 1:
            heads = self._routes[0].our_heads, self._routes[0].their_heads
            runs = paired_runs(self._layout, self._peer_layout, 0, source, destination, *heads)
            if sum(run.nbytes for run in runs) >= len(runs) * _LONG_RUN_BYTES:
                return _Way(source, destination, runs, None)
        table = torch.tensor([source, destination], dtype=torch.int32, pin_memory=True)
        return _Way(source, destination, [], table.to(self._driver.device, non_blocking=True))

    def _copy(self, way: _Way, layer: int) -> None:
        """Enqueues it on the thread's stream."""
        if way.table is not None:
            for route in self._routes:
                copy_blocks(route.source[layer], route.destination[layer], way.table)
            return
        (route,) = self._routes
        ours = self._base(route.source, route.our_heads, layer, self._layout)
        theirs = self._base(route.destination, route.their_heads, layer, self._peer_layout)
        for run in way.runs:
            self._driver.copy(theirs + run.destination, ours + run.source, run.nbytes, self._stream.cuda_stream)

    def _base(self, words: Tensor, heads: range, layer: int, layout: SlabLayout) -> int:
        """Address from which the runs of layer 0 count in this layer."""
        return words.data_ptr() - heads.start * layout.head_bytes + layer * layout.layer_bytes


def _words(memory: Tensor, layout: SlabLayout, heads: range) -> Tensor:
    """uint8 [nbytes and more] -> int64 [layers, blocks, words of the heads in a block]"""
    words = memory[: layout.nbytes].view(torch.int64)
    blocks = words.view(layout.num_layers, layout.num_blocks, layout.block_bytes // _WORD_BYTES)
    head_words = layout.head_bytes // _WORD_BYTES
    return blocks[:, :, heads.start * head_words : heads.stop * head_words]
