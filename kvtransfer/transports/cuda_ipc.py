"""GPUs of one host: a chunk's blocks go over NVLink straight into the decode worker's slabs (see mapped.py).

Writing is asynchronous. On a stream of its own, one kernel waits for a chunk's layers to be computed and writes them
all; when the kernel has ended, one message announces the layers. The engine never waits for NVLink, and the link's
thread waits only when it has nothing else to do.

A chunk's layers leave together, after the last one, though each could leave while the next is computed. Because a
prompt makes a GPU compute at the limit of its power, and NVLink, when awake, takes 3 % of its clock whatever goes over
it, NVLink sleeps while the model computes. For 8,192 tokens of an 8B model this costs 3.4 ms at the end, in place of
7 ms spread over the step (benchmarks/push_slowdown.py).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton_proto.transfer import Blocks
from kvtransfer.transports.copy_blocks import copy_blocks, head_words
from kvtransfer.transports.mapped import PeerSlabs
from kvtransfer.transports.transport import BlockWriter, PrefillEnd, Shipment
from runtime.device.cuda_memory import CudaMemory


@dataclass(frozen=True, slots=True)
class _Route:
    """The heads that one rank of the decode worker gets."""

    ours: range
    theirs: range
    destination: Tensor  # its slab's bytes


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    message: Blocks
    written: torch.cuda.Event
    table: Tensor  # kept, because the kernel reads it


class CudaIpcWriter(BlockWriter):
    at_once = True

    def __init__(self, end: PrefillEnd) -> None:
        """Raises ProtocolError when the descriptors are not what a Welcome brings, UnavailableError when this GPU
        cannot reach the memory."""
        slab = end.slab
        assert isinstance(slab.driver, CudaMemory)
        self._channel = end.channel
        self._driver = slab.driver
        self._peer = PeerSlabs(slab.driver, end.fds, end.parts, end.peer_layout.nbytes, end.channel.peer)
        try:
            self._prepare(end)
        except BaseException:
            self._peer.close()
            raise

    def _prepare(self, end: PrefillEnd) -> None:
        slab = end.slab
        torch.cuda.set_device(self._driver.device)  # device and stream are this thread's; no other thread writes
        self._stream = torch.cuda.Stream(self._driver.device, priority=-1)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self._stream)
        self._source, self._layout, self._peer_layout = slab.flat.view(torch.uint8), slab.layout, end.peer_layout
        targets = [(part.heads, target.heads) for part in end.parts for target in part.targets]
        self._routes: list[_Route] = []
        for (our_heads, their_heads), memory in zip(targets, self._peer.memories, strict=True):
            theirs = torch.as_tensor(memory.array, device=self._driver.device)
            self._routes.append(_Route(our_heads, their_heads, theirs))
        self._on_their_way: deque[_OnItsWay] = deque()
        self._blocks: tuple[Sequence[int], Sequence[int]] = ((), ())
        self._table = torch.empty(2, 0, dtype=torch.int32, device=self._driver.device)  # for self._blocks
        self._copy(range(1))  # loads the kernel before somebody waits for it

    def write(self, shipment: Shipment) -> bool:
        if shipment.stopped():
            return False
        blocks = (shipment.source, shipment.destination)
        if self._blocks != blocks:  # shipments of one chunk share the table
            self._blocks = blocks
            table = torch.tensor(blocks, dtype=torch.int32, pin_memory=True)
            layer = shipment.message.layer
            table[0] -= self._layout.layer_blocks(layer).start
            table[1] -= self._peer_layout.layer_blocks(layer).start
            self._table = table.to(self._driver.device, non_blocking=True)
        if shipment.ready is not None:
            shipment.ready.wait(self._stream)
        self._copy(shipment.message.layer_range)
        # Because most of the step is often still to be computed, waiting for the event sleeps and does not spin.
        written = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        written.record(self._stream)
        self._on_their_way.append(_OnItsWay(shipment.message, written, self._table))
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
        try:
            self._stream.synchronize()
        finally:  # after a fault of CUDA nothing runs here any more
            self._on_their_way.clear()
            self._routes.clear()
            self._peer.close()

    def _announce(self) -> None:
        self._channel.send(self._on_their_way[0].message)
        self._on_their_way.popleft()

    def _copy(self, layers: range) -> None:
        """Enqueues the copy on the thread's stream."""
        for route in self._routes:
            source = head_words(self._source, self._layout, route.ours, layers)
            destination = head_words(route.destination, self._peer_layout, route.theirs, layers)
            copy_blocks(source, destination, self._table)
