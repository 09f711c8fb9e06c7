"""TCP: the sending kernel gathers blocks from one slab, the receiving one scatters them into the others.

Only the decode worker's own thread writes its slabs here: the end of the connection proves that nobody writes any more.
"""

from collections.abc import Sequence

from baton_proto.transfer import Welcome
from kvtransfer.slab.head_plan import Part
from kvtransfer.transports.host_window import HostWindow
from kvtransfer.transports.transport import DecodeEnd, PrefillEnd, Shipment, piece_blocks


class TcpWriter:
    """Implements `kvtransfer.transports.transport.BlockWriter`."""

    at_once = False

    def __init__(self, end: PrefillEnd) -> None:
        self.piece_blocks = piece_blocks(end.slab.layout)
        self._channel = end.channel
        self._windows = [HostWindow(end.slab, part.heads) for part in end.parts]

    def write(self, shipment: Shipment) -> bool:
        if shipment.stopped():
            return False
        message, source = shipment.message, shipment.source
        assert message.layers == 1, "the link ships layer by layer what is not at_once, and a window holds one layer"
        pieces = [piece for window in self._windows for piece in window.read(message.layer, source, shipment.ready)]
        self._channel.send(message, pieces)
        return True

    def settle(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing to undo: what is not sent cannot arrive."""


class TcpIntake:
    """Implements `kvtransfer.transports.transport.BlockIntake`."""

    peer_writes = False

    def __init__(self, end: DecodeEnd) -> None:
        self._channel = end.channel
        self._slabs = end.slabs
        self._windows: list[list[HostWindow]] = []  # by part, where it belongs

    def welcome(self, message: Welcome, parts: Sequence[Part]) -> None:
        self._windows = [
            [HostWindow(self._slabs[target.rank], target.heads) for target in part.targets] for part in parts
        ]
        self._channel.send_now(message)

    def await_message(self) -> None:
        """The channel waits by itself."""

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

    def settle(self) -> None:
        """Nothing is on its way between two calls."""

    def await_silence(self, wake_fd: int) -> bool:
        return True

    def close(self) -> None: ...
