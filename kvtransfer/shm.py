"""Shared memory: the prefill worker copies blocks to where they belong in the decode worker's slab, see mapped.py."""

from collections.abc import Callable, Sequence

import numpy as np

from baton_proto.transfer import Blocks, ToPrefill
from kvtransfer.framing import Channel
from kvtransfer.layout import SlabLayout
from kvtransfer.mapped import PeerSlab
from kvtransfer.plan import paired_runs
from kvtransfer.slab import Mark, Slab
from kvtransfer.transport import MAX_PIECE_BLOCKS


class ShmWriter:
    """Implements `kvtransfer.transport.BlockWriter`."""

    transport = "shm"
    piece_blocks = MAX_PIECE_BLOCKS

    def __init__(self, channel: Channel[ToPrefill], slab: Slab, peer_layout: SlabLayout, fds: list[int]) -> None:
        """Takes the descriptors over. Raises ProtocolError when they are not what a welcome brings."""
        self._channel = channel
        self._layout = slab.layout
        self._peer_layout = peer_layout
        self._peer = PeerSlab(slab.driver, fds, peer_layout.nbytes, channel.peer)
        self._source = np.frombuffer(slab.buffer, dtype=np.uint8)
        self._destination = np.asarray(self._peer.memory.array)

    def write(
        self,
        message: Blocks,
        source: Sequence[int],
        destination: Sequence[int],
        ready: Mark | None,
        stopped: Callable[[], bool],
    ) -> bool:
        for run in paired_runs(self._layout, self._peer_layout, message.layer, source, destination):
            if stopped():
                return False
            ours = self._source[run.source : run.source + run.nbytes]
            self._destination[run.destination : run.destination + run.nbytes] = ours  # numpy copies without the GIL
        self._channel.send(message)
        return True

    def settle(self) -> bool:
        return False

    def close(self) -> None:
        del self._source, self._destination
        self._peer.close()
