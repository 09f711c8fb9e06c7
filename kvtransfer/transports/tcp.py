"""TCP: the sending kernel gathers blocks from one slab, the receiving kernel scatters them into the others.

Only the decode worker's own thread writes its slabs: the end of the connection proves that nobody writes any more.
"""

from collections.abc import Sequence

from baton_proto.transfer import Welcome
from kvtransfer.slab.head_plan import Part
from kvtransfer.transports.host_window import HostWindow
from kvtransfer.transports.transport import BlockIntake, BlockWriter, DecodeEnd, PrefillEnd, Shipment, piece_blocks


class TcpWriter(BlockWriter):
    def __init__(self, end: PrefillEnd) -> None:
        self.piece_blocks = piece_blocks(end.slab.layout)
        self._channel = end.channel
        self._windows = [HostWindow(end.slab, part.heads) for part in end.parts]

    def write(self, shipment: Shipment) -> bool:
        if shipment.stopped():
            return False
        message, source = shipment.message, shipment.source
        assert message.layers == 1, "a window holds one layer, and a writer that is not at_once gets one at a time"
        pieces = [piece for window in self._windows for piece in window.read(message.layer, source, shipment.ready)]
        self._channel.send(message, pieces)
        return True


class TcpIntake(BlockIntake):
    def __init__(self, end: DecodeEnd) -> None:
        self._channel = end.channel
        self._slabs = end.slabs
        self._windows: list[list[HostWindow]] = []  # for each part, one window per target

    def welcome(self, message: Welcome, parts: Sequence[Part]) -> None:
        self._windows = [
            [HostWindow(self._slabs[target.rank], target.heads) for target in part.targets] for part in parts
        ]
        self._channel.send_now(message)

    def take(self, layers: range, blocks: Sequence[int]) -> None:
        for layer in layers:
            for first, *_ in self._windows:
                self._channel.receive_into(first.landing(layer, blocks))
            for first, *copies in self._windows:
                for copy in copies:
                    for to, piece in zip(copy.landing(layer, blocks), first.landing(layer, blocks), strict=True):
                        to[:] = piece
                for window in (first, *copies):
                    window.land(layer, blocks)
