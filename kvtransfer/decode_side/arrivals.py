"""What has arrived of a transfer on the decode side, from its first Begin to its end."""

from dataclasses import dataclass, field

from baton_proto.timeline import PushedChunk


class Arrivals:
    """Which (layer, granted block) pairs of one transfer one writer has written."""

    def __init__(self, num_layers: int, num_blocks: int, missing: int) -> None:
        """missing: the pairs that are due."""
        self._num_blocks = num_blocks
        self._seen = bytearray(num_layers * num_blocks)
        self.missing = missing

    def mark(self, layer: int, first: int, count: int) -> bool:
        """Returns False when one of the blocks had been written before."""
        begin = layer * self._num_blocks + first
        if self._seen.find(1, begin, begin + count) >= 0:
            return False
        self._seen[begin : begin + count] = b"\x01" * count
        self.missing -= count
        return True


@dataclass(slots=True)
class Progress:
    """What has arrived of a begun transfer."""

    arrivals: dict[int, Arrivals] = field(default_factory=dict)  # by writer: each brings other heads of all blocks
    payload: bytes = b""  # rank 0's
    transport: str = ""  # rank 0's
    sent_us: int = 0  # rank 0's
    pushes: list[PushedChunk] = field(default_factory=list)
