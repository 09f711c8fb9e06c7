"""NCCL between GPUs that cannot map each other's memory: a kernel gathers blocks, one send carries them, and a kernel
scatters them. While one of two buffers is on the link, the other is filled here and emptied there.

A message announces each send over TCP, once the layer is computed and a buffer is free; only then does the decode side
ask NCCL for it. So its GPU never waits for a prompt that is still being computed, and two sends at most are on their
way. The slabs are written by the decode side alone, as with TCP: when it has aborted its end, nobody writes them.

Rank 0 of a decode worker receives for all of its ranks and scatters into their slabs, which it has mapped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from baton.errors import ProtocolError, UnavailableError
from baton_proto.transfer import ToDecode, ToPrefill, Welcome
from engine.kernels.copy_blocks import copy_blocks
from kvtransfer.adopted_slab import RankSlab
from kvtransfer.cuda_memory import CudaMemory
from kvtransfer.framing import Channel
from kvtransfer.head_plan import Part
from kvtransfer.head_words import WORD_BYTES, head_words
from kvtransfer.layout import SlabLayout
from kvtransfer.nccl_pair import RECEIVER, SENDER, NcclPair, PeerWatch, new_pair_id
from kvtransfer.slab import Slab
from kvtransfer.transport import MAX_PIECE_BLOCKS, STALL_TIMEOUT_S, Shipment

BUFFER_BYTES = 64 << 20  # each end has two; a send of 8 MiB reaches 240 GB/s, of 32 310, of 64 330 (H200)
_TABLES = 64  # kept; the layers of a chunk share theirs


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Buffer:
    words: Tensor  # int64, as many as a piece has
    due: torch.cuda.Event = field(default_factory=_event)  # what is to be gathered is computed
    full: torch.cuda.Event = field(default_factory=_event)  # gathered, or received
    empty: torch.cuda.Event = field(default_factory=_event)  # sent, or scattered


class _End:
    """What both ends have: two streams, two buffers, and the heads of a piece, part by part."""

    def __init__(self, layout: SlabLayout, parts: Sequence[Part], device: torch.device) -> None:
        """Raises UnavailableError when the GPU has no room for the buffers."""
        torch.cuda.set_device(device)  # of this thread, and so is the stream of the kernels: nobody else launches here
        self.device = device
        self.sizes = [len(part.heads) * layout.head_bytes // WORD_BYTES for part in parts]
        block_bytes = sum(self.sizes) * WORD_BYTES
        self.piece_blocks = max(1, min(BUFFER_BYTES // block_bytes, MAX_PIECE_BLOCKS))
        self.kernels = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.link = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self.kernels)
        words = self.piece_blocks * sum(self.sizes)
        try:
            self.buffers = [_Buffer(torch.empty(words, dtype=torch.int64, device=device)) for _ in range(2)]
        except torch.OutOfMemoryError as error:
            raise UnavailableError(f"no room for NCCL's buffers of {BUFFER_BYTES >> 20} MiB each") from error
        self._turns = cycle(self.buffers)
        self._tables: dict[tuple[int, ...], Tensor] = {}

    def next_buffer(self) -> _Buffer:
        return next(self._turns)

    def table(self, blocks: Sequence[int]) -> Tensor:
        """int32 [3, count]: the blocks, their places in a buffer, the blocks."""
        key = tuple(blocks)
        table = self._tables.get(key)
        if table is None:
            host = torch.empty(3, len(blocks), dtype=torch.int32, pin_memory=True)
            rows = host.numpy()
            rows[0] = rows[2] = blocks
            rows[1] = np.arange(len(blocks))
            if len(self._tables) >= _TABLES:
                self._tables.clear()
            table = self._tables[key] = host.to(self.device, non_blocking=True)
        return table

    def words_of(self, buffer: _Buffer, count: int) -> Tensor:
        """Those that a piece of so many blocks takes."""
        return buffer.words[: count * sum(self.sizes)]

    def parts_of(self, buffer: _Buffer, count: int) -> list[Tensor]:
        """The same, as int64 [1, count, words of the part's heads] for each part."""
        pieces = torch.split(self.words_of(buffer, count), [count * size for size in self.sizes])
        return [piece.view(1, count, size) for piece, size in zip(pieces, self.sizes, strict=True)]

    def close(self) -> None:
        """After the communicator's abort, with which what was on its way ends."""
        self.link.synchronize()
        self.kernels.synchronize()
        self.buffers.clear()


class NcclWriter:
    """Implements `kvtransfer.transport.BlockWriter`."""

    transport = "nccl"
    at_once = False

    def __init__(
        self, channel: Channel[ToPrefill], slab: Slab, parts: Sequence[Part], pair_id: bytes, timeout_s: float
    ) -> None:
        """Raises OSError, UnavailableError."""
        assert isinstance(slab.driver, CudaMemory)
        self._channel = channel
        self._end = _End(slab.layout, parts, slab.driver.device)
        self.piece_blocks = self._end.piece_blocks
        memory = slab.tensor.flatten().view(torch.uint8)
        self._sources = [head_words(memory, slab.layout, part.heads) for part in parts]
        self._gather(self._end.buffers[0], 0, ())  # loads the kernel before somebody waits for it
        self._watch = PeerWatch(channel.sock, channel.peer)
        self._pair = NcclPair(pair_id, SENDER, self._watch, timeout_s)

    def write(self, shipment: Shipment) -> bool:
        if shipment.stopped():
            return False
        source, end, buffer = shipment.source, self._end, self._end.next_buffer()
        self._watch.until(buffer.empty.query, STALL_TIMEOUT_S)
        if shipment.ready is not None:
            shipment.ready.wait(end.kernels)
            buffer.due.record(end.kernels)
            self._watch.until(buffer.due.query)  # however long the layer takes
        if shipment.stopped():
            return False
        self._channel.send(shipment.message)
        self._gather(buffer, shipment.message.layer, source)
        buffer.full.record(end.kernels)
        buffer.full.wait(end.link)
        self._pair.send(end.words_of(buffer, len(source)), end.link)
        buffer.empty.record(end.link)
        return True

    def settle(self) -> bool:
        """It is all said, and now it has left our slab too."""
        self._watch.until(self._end.kernels.query, STALL_TIMEOUT_S)
        return False

    def close(self) -> None:
        self._pair.abort()
        self._end.close()
        self._sources.clear()

    def _gather(self, buffer: _Buffer, layer: int, blocks: Sequence[int]) -> None:
        to_buffer = self._end.table(blocks)[:2]
        for words, part in zip(self._sources, self._end.parts_of(buffer, len(blocks)), strict=True):
            copy_blocks(words[layer : layer + 1], part, to_buffer)


class NcclIntake:
    """Implements `kvtransfer.transport.BlockIntake`."""

    transport = "nccl"
    peer_writes = False

    def __init__(self, channel: Channel[ToDecode], slabs: Sequence[RankSlab], timeout_s: float) -> None:
        self._channel = channel
        self._slabs = slabs
        self._timeout_s = timeout_s
        self._watch = PeerWatch(channel.sock, channel.peer)
        self._end: _End | None = None
        self._pair: NcclPair | None = None
        self._destinations: list[list[Tensor]] = []  # by part, where it belongs

    def welcome(self, message: Welcome, parts: Sequence[Part]) -> None:
        """Raises OSError, UnavailableError."""
        driver, layout = self._slabs[0].driver, self._slabs[0].layout
        assert isinstance(driver, CudaMemory)
        self._end = _End(layout, parts, driver.device)
        memories = [slab.tensor.flatten().view(torch.uint8) for slab in self._slabs]
        self._destinations = [
            [head_words(memories[target.rank], layout, target.heads) for target in part.targets] for part in parts
        ]
        self._scatter(self._end, self._end.buffers[0], 0, ())  # loads the kernel
        pair_id = new_pair_id()
        self._channel.send_now(replace(message, pair_id=pair_id))
        self._pair = NcclPair(pair_id, RECEIVER, self._watch, self._timeout_s)

    def await_message(self) -> None:
        """The channel waits by itself."""

    def take(self, layer: int, blocks: Sequence[int]) -> None:
        """Enqueues it all: `settle` is what waits. Raises ProtocolError, OSError, UnavailableError."""
        assert self._end is not None
        assert self._pair is not None
        end = self._end
        if len(blocks) > end.piece_blocks:
            raise ProtocolError(
                self._channel.peer, f"sends {len(blocks)} blocks at once; {end.piece_blocks} are allowed"
            )
        buffer = end.next_buffer()
        buffer.empty.wait(end.link)
        self._pair.receive(end.words_of(buffer, len(blocks)), end.link)
        buffer.full.record(end.link)
        buffer.full.wait(end.kernels)
        self._scatter(end, buffer, layer, blocks)
        buffer.empty.record(end.kernels)

    def settle(self) -> None:
        assert self._end is not None
        for buffer in self._end.buffers:
            self._watch.until(buffer.empty.query, STALL_TIMEOUT_S)

    def await_silence(self, wake_fd: int) -> bool:
        self.close()
        return True

    def close(self) -> None:
        if self._pair is not None:
            self._pair.abort()
            self._pair = None
        if self._end is not None:
            self._end.close()
            self._end = None
        self._destinations.clear()

    def _scatter(self, end: _End, buffer: _Buffer, layer: int, blocks: Sequence[int]) -> None:
        from_buffer = end.table(blocks)[1:]
        for places, part in zip(self._destinations, end.parts_of(buffer, len(blocks)), strict=True):
            for words in places:
                copy_blocks(part, words[layer : layer + 1], from_buffer)
