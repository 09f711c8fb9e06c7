"""What a transport is: one class that puts blocks into the peer's slabs, and one that stands by where they land.

shm.py, cuda_ipc.py, nccl.py and tcp.py implement them; link.py (prefill side) and connection.py (decode side) do not
know which one they use.
"""

import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton_proto.transfer import Blocks, Welcome
from kvtransfer.slab.head_plan import Part
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import Mark

STALL_TIMEOUT_S = 10.0  # a peer that takes or answers nothing for this long is given up
MAX_PIECE_BYTES = 4 << 20  # what one message announces where bytes go through host memory; a cancel waits for it
MAX_PIECE_BLOCKS = 8192  # what one message announces of a layer; its checksums are at most 8 parts of 8 bytes a block


@dataclass(frozen=True, slots=True)
class Shipment:
    """What one message announces: our blocks `source` of its layers, and where they belong in the peer's slabs."""

    message: Blocks
    source: Sequence[int]
    destination: Sequence[int]
    ready: Mark | None  # when they are computed
    stopped: Callable[[], bool]  # whether nobody wants them any more


class BlockWriter(Protocol):
    """Prefill side of one connection, made and used by the link's thread alone."""

    transport: str
    piece_blocks: int  # how many one `write` takes
    at_once: bool  # whether a chunk's layers are written as one shipment when the last is computed, else each by itself

    def write(self, shipment: Shipment) -> bool:
        """Puts what we send of the blocks where they belong when they are ready, and says so, now or in `settle`.
        False: stopped before it was said."""

    def settle(self) -> bool:
        """Waits for the oldest blocks that are still on their way, and says so. False: there are none."""

    def close(self) -> None:
        """After it, nothing here can write the peer's slabs."""


class BlockIntake(Protocol):
    """Decode side of one connection, used by the connection's thread alone."""

    transport: str
    peer_writes: bool  # the slabs, itself: then the end of the connection does not prove that it has stopped

    def welcome(self, message: Welcome, parts: Sequence[Part]) -> None:
        """Answers the peer's hello, with what it needs in order to write `parts`."""

    def await_message(self) -> None:
        """Returns when the connection has news. Raises OSError when the peer died without closing it."""

    def take(self, layers: range, blocks: Sequence[int]) -> None:
        """Puts what the peer sends of the blocks that it announced into these layers, now or until `settle` returns."""

    def settle(self) -> None:
        """Returns when all that was taken is in the slabs. Raises OSError when it will not be."""

    def await_silence(self, wake_fd: int) -> bool:
        """Called when the connection has ended. True: the peer is proven unable to write. False: `wake_fd` woke us."""

    def close(self) -> None: ...


def piece_blocks(layout: SlabLayout) -> int:
    """Blocks that one message may announce where bytes go through host memory."""
    return max(1, min(MAX_PIECE_BYTES // layout.block_bytes, MAX_PIECE_BLOCKS))


def limit_sending(sock: socket.socket, timeout_s: float) -> None:
    """Makes a blocking send fail when the peer took nothing for this long."""
    seconds = int(timeout_s)
    packed = struct.pack("ll", seconds, int((timeout_s - seconds) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)
