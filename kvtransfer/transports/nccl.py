"""NCCL between GPUs that cannot map each other's memory: a kernel gathers blocks, one send carries them, and a kernel
scatters them. While one buffer is on the network, another is filled here and another is emptied there.

A message announces a chunk's layers over TCP once the last layer is computed, and only then does the decode side ask
NCCL for them: its GPU never waits for a prompt that is still being computed. Both ends cut what a message announces
into the same sends, and no more sends are on their way than there are buffers. In a send the order is layer, block,
part. A chunk's layers wait for each other for the reason in cuda_ipc.py, and because NCCL is fast with few large sends.

Only the decode side writes its slabs: when it has aborted its end, nobody writes them. Rank 0 of a decode worker
receives for all of its ranks and scatters into their slabs, which it has mapped.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from baton_proto.transfer import Welcome
from kvtransfer.slab.head_plan import Part
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.transports.copy_blocks import WORD_BYTES, copy_blocks, head_words
from kvtransfer.transports.nccl_pair import RECEIVER, SENDER, NcclPair, PeerWatch, new_pair_id
from kvtransfer.transports.transport import MAX_PIECE_BLOCKS, BlockIntake, BlockWriter, DecodeEnd, PrefillEnd, Shipment
from kvtransfer.wire.sockets import STALL_TIMEOUT_S
from runtime.device.cuda_memory import CudaMemory
from runtime.errors import UnavailableError

# A send takes 13 us, and its bytes go at 350 GB/s (H200); each send also costs both hosts about 100 us, which the send
# before it hides. 512 MiB go at 261 to 272 GB/s in pieces of 32 MiB, at 278 to 290 in 64s (benchmarks/kv_push.py).
BUFFER_BYTES = 64 << 20
NUM_BUFFERS = 2
_KERNELS_PRIORITY, _LINK_PRIORITY = (
    -1,
    -2,
)  # else a scatter that begins first keeps the next receive off most processors
_MAX_TABLES = 64  # kept; the layers of a chunk share one


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Buffer:
    parts: list[Tensor]  # for each part int64 [piece_blocks, words of the part's heads]: columns of the rows
    address: int  # of the first row
    full: torch.cuda.Event = field(default_factory=_event)  # gathered, or received
    empty: torch.cuda.Event = field(default_factory=_event)  # sent, or scattered

    def rows(self, num_layers: int, num_blocks: int) -> list[Tensor]:
        """The first rows, layer by layer: for each part int64 [num_layers, num_blocks, words of the part's heads]."""
        count = num_layers * num_blocks
        return [part[:count].view(num_layers, num_blocks, part.shape[1]) for part in self.parts]


class _Buffers:
    """Two streams, and buffers that are filled and emptied in turn. Each end of a pair has them."""

    def __init__(self, layout: SlabLayout, parts: Sequence[Part], device: torch.device) -> None:
        """Raises UnavailableError when the GPU has no room for the buffers."""
        torch.cuda.set_device(device)  # device and stream are this thread's; no other thread launches here
        self.device = device
        self.layout = layout
        sizes = [len(part.heads) * layout.head_bytes // WORD_BYTES for part in parts]
        self.block_bytes = sum(sizes) * WORD_BYTES
        self.piece_blocks = max(1, min(BUFFER_BYTES // self.block_bytes, MAX_PIECE_BLOCKS))
        self.kernels = torch.cuda.Stream(device, priority=_KERNELS_PRIORITY)  # type: ignore[no-untyped-call]
        self.link = torch.cuda.Stream(device, priority=_LINK_PRIORITY)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self.kernels)
        try:
            self.ring = deque(self._buffer(sizes) for _ in range(NUM_BUFFERS))
        except torch.OutOfMemoryError as error:
            raise UnavailableError(f"no room for NCCL's buffers of {BUFFER_BYTES >> 20} MiB each") from error
        self._tables: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def _buffer(self, sizes: Sequence[int]) -> _Buffer:
        words = torch.empty(self.piece_blocks, sum(sizes), dtype=torch.int64, device=self.device)
        return _Buffer(list(torch.split(words, list(sizes), dim=1)), words.data_ptr())

    def pieces(self, layers: range, blocks: Sequence[int]) -> Iterator[tuple[range, Sequence[int]]]:
        """Cuts blocks into what one buffer takes, in the order of sending: several layers of few blocks, or some blocks
        of one layer."""
        num_layers = max(1, self.piece_blocks // max(1, len(blocks)))
        for layer in range(layers.start, layers.stop, num_layers):
            for first in range(0, len(blocks), self.piece_blocks):
                yield range(layer, min(layer + num_layers, layers.stop)), blocks[first : first + self.piece_blocks]

    def next(self) -> _Buffer:
        self.ring.rotate(-1)
        return self.ring[0]

    def tables(self, layer: int, blocks: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Two tables for `copy_blocks`, int32 [2, count]: from the layer's blocks to their rows in a buffer, and
        back."""
        key = tuple(blocks)
        tables = self._tables.get(key)
        if tables is None:
            host = torch.empty(3, len(key), dtype=torch.int32, pin_memory=True)
            rows = host.numpy()
            rows[0] = np.array(key, dtype=np.int32) - self.layout.layer_blocks(layer).start
            rows[1] = np.arange(len(key))
            rows[2] = rows[0]
            if len(self._tables) >= _MAX_TABLES:
                self._tables.clear()
            table = host.to(self.device, non_blocking=True)
            tables = self._tables[key] = (table[:2], table[1:])
        return tables

    def close(self) -> None:
        """After the communicator's abort, which ends what was on its way."""
        self.link.synchronize()
        self.kernels.synchronize()
        self.ring.clear()


class NcclWriter(BlockWriter):
    at_once = True

    def __init__(self, end: PrefillEnd) -> None:
        """Raises OSError, UnavailableError."""
        slab = end.slab
        assert isinstance(slab.driver, CudaMemory)
        self._channel = end.channel
        self._buffers = _Buffers(slab.layout, end.parts, slab.driver.device)
        self._memory, self._heads = slab.flat.view(torch.uint8), [part.heads for part in end.parts]
        self._computed = _event()
        self._gather(self._buffers.ring[0], range(1), ())  # loads the kernel before somebody waits for it
        self._watch = PeerWatch(end.channel.sock, end.channel.peer)
        self._pair = NcclPair(end.welcome.rendezvous, SENDER, self._watch, end.timeout_s)

    def write(self, shipment: Shipment) -> bool:
        if shipment.stopped():
            return False
        buffers = self._buffers
        if shipment.ready is not None:
            shipment.ready.wait(buffers.kernels)
            self._computed.record(buffers.kernels)
            self._watch.until(self._computed.query)  # however long the layers take
        if shipment.stopped():
            return False
        self._channel.send(shipment.message)
        for layers, blocks in buffers.pieces(shipment.message.layer_range, shipment.source):
            buffer = buffers.next()
            self._watch.until(buffer.empty.query, STALL_TIMEOUT_S)
            self._gather(buffer, layers, blocks)
            buffer.full.record(buffers.kernels)
            buffer.full.wait(buffers.link)
            self._pair.send(buffer.address, len(layers) * len(blocks) * buffers.block_bytes, buffers.link)
            buffer.empty.record(buffers.link)
        return True

    def settle(self) -> bool:
        """All blocks were announced by write(); here they have also left our slab."""
        self._watch.until(self._buffers.kernels.query, STALL_TIMEOUT_S)
        return False

    def close(self) -> None:
        self._pair.abort()
        self._buffers.close()

    def _gather(self, buffer: _Buffer, layers: range, blocks: Sequence[int]) -> None:
        to_buffer, _ = self._buffers.tables(layers.start, blocks)
        for heads, rows in zip(self._heads, buffer.rows(len(layers), len(blocks)), strict=True):
            copy_blocks(head_words(self._memory, self._buffers.layout, heads, layers), rows, to_buffer)


class NcclIntake(BlockIntake):
    def __init__(self, end: DecodeEnd) -> None:
        self._channel = end.channel
        self._slabs = end.slabs
        self._timeout_s = end.timeout_s
        self._watch = PeerWatch(end.channel.sock, end.channel.peer)
        self._buffers: _Buffers | None = None
        self._pair: NcclPair | None = None
        self._destinations: list[list[tuple[Tensor, range]]] = []  # for each part, each target's slab and its heads

    def welcome(self, message: Welcome, parts: Sequence[Part]) -> None:
        """Raises OSError, UnavailableError."""
        driver, layout = self._slabs[0].driver, self._slabs[0].layout
        assert isinstance(driver, CudaMemory)
        self._buffers = _Buffers(layout, parts, driver.device)
        memories = [slab.flat.view(torch.uint8) for slab in self._slabs]
        self._destinations = [[(memories[target.rank], target.heads) for target in part.targets] for part in parts]
        self._scatter(self._buffers, self._buffers.ring[0], range(1), ())  # loads the kernel
        pair_id = new_pair_id()
        self._channel.send_now(replace(message, rendezvous=pair_id))
        self._pair = NcclPair(pair_id, RECEIVER, self._watch, self._timeout_s)

    def take(self, layers: range, blocks: Sequence[int]) -> None:
        """Enqueues receives and scatters; settle() waits for them. Raises OSError, UnavailableError."""
        assert self._buffers is not None
        assert self._pair is not None
        buffers = self._buffers
        for piece_layers, piece_blocks in buffers.pieces(layers, blocks):
            buffer = buffers.next()
            buffer.empty.wait(buffers.link)
            nbytes = len(piece_layers) * len(piece_blocks) * buffers.block_bytes
            self._pair.receive(buffer.address, nbytes, buffers.link)
            buffer.full.record(buffers.link)
            buffer.full.wait(buffers.kernels)
            self._scatter(buffers, buffer, piece_layers, piece_blocks)
            buffer.empty.record(buffers.kernels)

    def settle(self) -> None:
        assert self._buffers is not None
        for buffer in self._buffers.ring:
            self._watch.until(buffer.empty.query, STALL_TIMEOUT_S)

    def await_silence(self, wake_fd: int) -> bool:
        self.close()
        return True

    def close(self) -> None:
        if self._pair is not None:
            self._pair.abort()
            self._pair = None
        if self._buffers is not None:
            self._buffers.close()
            self._buffers = None
        self._destinations.clear()

    def _scatter(self, buffers: _Buffers, buffer: _Buffer, layers: range, blocks: Sequence[int]) -> None:
        _, from_buffer = buffers.tables(layers.start, blocks)
        for places, rows in zip(self._destinations, buffer.rows(len(layers), len(blocks)), strict=True):
            for memory, heads in places:
                copy_blocks(rows, head_words(memory, buffers.layout, heads, layers), from_buffer)
