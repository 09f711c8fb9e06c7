"""Writes the layers of pushes to the decode worker: which blocks and layers one message announces, and their checksums.

The link's thread only.
"""

from collections.abc import Sequence

from baton_proto import transfer as wire
from kvtransfer.prefill_side.dial import Dialled
from kvtransfer.prefill_side.push import LayerBlocks, Push
from kvtransfer.slab.slab import EngineSlab
from kvtransfer.transports.host_window import HostWindow
from kvtransfer.transports.transport import Shipment, piece_blocks
from kvtransfer.wire.checksum import block_checksums


class LayerWriter:
    def __init__(self, slab: EngineSlab, dialled: Dialled, checksum: bool) -> None:
        self._layout = slab.layout
        self._writer = dialled.writer
        self._checksum = checksum
        self._piece_blocks = piece_blocks(slab.layout) if checksum else dialled.writer.piece_blocks
        head_bytes = slab.layout.head_bytes
        # For checksums: each part's window, and the bytes of the part's heads in one block.
        self._windows = [(HostWindow(slab, part.heads), len(part.heads) * head_bytes) for part in dialled.parts]

    def write(self, push: Push, layers: Sequence[LayerBlocks]) -> None:
        """Waits for the blocks and writes them; the decode worker is told now or in settle_all()."""
        for group in self._announced_together(layers):
            self._write_group(push, group)

    def settle_all(self) -> None:
        """Announces all blocks that are still on their way."""
        while self._writer.settle():
            pass

    def _announced_together(self, layers: Sequence[LayerBlocks]) -> list[list[LayerBlocks]]:
        """Groups the same blocks in neighbouring layers; with checksums, each layer is a group."""
        groups: list[list[LayerBlocks]] = []
        for blocks in layers:
            if groups and not self._checksum and blocks.continues(groups[-1][-1]):
                groups[-1].append(blocks)
            else:
                groups.append([blocks])
        return groups

    def _write_group(self, push: Push, group: Sequence[LayerBlocks]) -> None:
        layer, last = group[0].layer, group[-1]  # when the blocks of the last layer are ready, those of all layers are
        for begin in range(0, len(last.source), self._piece_blocks):
            source = last.source[begin : begin + self._piece_blocks]
            first = last.first + begin
            checksums = b""
            if self._checksum:
                checksums = b"".join(
                    block_checksums(window.read(layer, source, last.ready), nbytes) for window, nbytes in self._windows
                )
            message = wire.Blocks(push.transfer_id, layer, first, len(source), len(group), checksums)
            destination = push.grant.block_ids[first : first + len(source)]
            shipment = Shipment(message, source, destination, last.ready, lambda: push.stop is not None)
            if not self._writer.write(shipment):
                return
            push.kv_bytes += len(source) * len(group) * self._layout.block_bytes
