"""Shared memory: the prefill worker copies blocks to where they belong in the decode worker's slabs, see mapped.py."""

from collections.abc import Sequence
from itertools import product

import numpy as np

from baton_proto.transfer import ToPrefill
from kvtransfer.slab.byte_runs import paired_runs
from kvtransfer.slab.head_plan import Part
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import Slab
from kvtransfer.transports.mapped import PeerSlabs
from kvtransfer.transports.transport import MAX_PIECE_BLOCKS, Shipment
from kvtransfer.wire.framing import Channel


class ShmWriter:
    """Implements `kvtransfer.transports.transport.BlockWriter`."""

    transport = "shm"
    piece_blocks = MAX_PIECE_BLOCKS
    at_once = False

    def __init__(
        self,
        channel: Channel[ToPrefill],
        slab: Slab,
        peer_layout: SlabLayout,
        parts: Sequence[Part],
        fds: list[int],
    ) -> None:
        """Takes the descriptors over. Raises ProtocolError when they are not what a welcome brings."""
        self._channel = channel
        self._layout = slab.layout
        self._peer_layout = peer_layout
        self._peer = PeerSlabs(slab.driver, fds, parts, peer_layout.nbytes, channel.peer)
        self._source = np.frombuffer(slab.buffer, dtype=np.uint8)
        heads = [(part.heads, target.heads) for part in parts for target in part.targets]
        arrays = [np.asarray(memory.array) for memory in self._peer.memories]
        self._routes = list(zip(heads, arrays, strict=True))  # ours and theirs, and where

    def write(self, shipment: Shipment) -> bool:
        blocks = shipment.source, shipment.destination
        for layer, (heads, array) in product(shipment.message.layer_range, self._routes):
            for run in paired_runs(self._layout, self._peer_layout, layer, *blocks, *heads):
                if shipment.stopped():
                    return False
                ours = self._source[run.source : run.source + run.nbytes]
                array[run.destination : run.destination + run.nbytes] = ours  # numpy copies without the GIL
        self._channel.send(shipment.message)
        return True

    def settle(self) -> bool:
        return False

    def close(self) -> None:
        del self._source, self._routes
        self._peer.close()
