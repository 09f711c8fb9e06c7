"""Shared memory: the prefill worker copies blocks into the decode worker's slabs, which it maps (see mapped.py)."""

from itertools import product

import numpy as np

from kvtransfer.slab.byte_runs import paired_runs
from kvtransfer.transports.mapped import PeerSlabs
from kvtransfer.transports.transport import BlockWriter, PrefillEnd, Shipment


class ShmWriter(BlockWriter):
    def __init__(self, end: PrefillEnd) -> None:
        """Raises ProtocolError when the descriptors are not what a Welcome brings."""
        self._channel = end.channel
        self._layout = end.slab.layout
        self._peer_layout = end.peer_layout
        self._peer = PeerSlabs(end.slab.driver, end.fds, end.parts, end.peer_layout.nbytes, end.channel.peer)
        self._source = np.frombuffer(end.slab.buffer, dtype=np.uint8)
        heads = [(part.heads, target.heads) for part in end.parts for target in part.targets]
        arrays = [np.asarray(memory.array) for memory in self._peer.memories]
        self._routes = list(zip(heads, arrays, strict=True))  # (our heads, their heads), bytes of their slab

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

    def close(self) -> None:
        del self._source, self._routes
        self._peer.close()
