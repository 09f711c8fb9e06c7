"""What a transport is: a row of `kvtransfer/transports/table.py`, whose writer puts blocks into the peer's slabs, and
whose intake stands by where the blocks land. Links and connections do not know which transport they use.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton_proto.transfer import Blocks, ToDecode, ToPrefill, Welcome
from kvtransfer.slab.head_plan import Part
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import EngineSlab, Mark, RankSlab
from kvtransfer.wire.framing import Channel
from kvtransfer.wire.sockets import SocketKind
from runtime.device.driver import MemoryKind

MAX_PIECE_BYTES = 4 << 20  # what one message announces where bytes go through host memory; a cancel waits for it
MAX_PIECE_BLOCKS = 8192  # what one message announces of a layer; its checksums are at most 8 parts of 8 bytes a block


@dataclass(frozen=True, slots=True)
class Shipment:
    """What one message announces: our blocks `source` of its layers, and where they belong in the peer's slabs."""

    message: Blocks
    source: Sequence[int]
    destination: Sequence[int]
    ready: Mark | None  # when the blocks are computed
    stopped: Callable[[], bool]  # whether nobody wants the blocks any more


class BlockWriter(Protocol):
    """The prefill side of one connection. One thread makes it and uses it."""

    piece_blocks: int = MAX_PIECE_BLOCKS  # how many blocks one `write` takes
    at_once: bool = False  # True: the layers of a chunk are one shipment, once the last is computed; False: each is one

    @abstractmethod
    def write(self, shipment: Shipment) -> bool:
        """Waits for the blocks, copies our heads to the peer, and announces them here or in settle(). False: the
        shipment was stopped before it was announced."""

    def settle(self) -> bool:
        """Waits for the oldest blocks that are still on their way, and announces them. False: there are none."""
        return False

    def close(self) -> None:
        """After it, nothing here can write the peer's slabs."""


class BlockIntake(Protocol):
    """The decode side of one connection. One thread makes it and uses it."""

    peer_writes: bool = False  # True: the peer writes the slabs itself, so a closed connection proves nothing

    @abstractmethod
    def welcome(self, message: Welcome, parts: Sequence[Part]) -> None:
        """Answers the peer's Hello, with what the peer needs in order to write `parts`."""

    def await_message(self) -> None:
        """Returns when the connection may have news. Raises OSError when the peer died without closing it."""

    def take(self, layers: range, blocks: Sequence[int]) -> None:
        """Puts the announced blocks of these layers into the slabs, before it or settle() returns."""

    def settle(self) -> None:
        """Returns when all blocks that were taken are in the slabs. Raises OSError when they will not be."""

    def await_silence(self, wake_fd: int) -> bool:
        """After the end of the connection. True: the peer is proven unable to write. False: `wake_fd` became readable
        first."""
        return True

    def close(self) -> None:
        """After it, nothing that was on its way is written any more."""


@dataclass(frozen=True, slots=True)
class PrefillEnd:
    """The prefill side of a connection after the Welcome: what a writer is made of."""

    channel: Channel[ToPrefill]
    slab: EngineSlab
    peer_layout: SlabLayout  # of each of the peer's slabs
    parts: Sequence[Part]  # what we send
    welcome: Welcome
    fds: list[int]  # that came with the Welcome; the writer takes them over
    timeout_s: float  # for a meeting beside the connection


@dataclass(frozen=True, slots=True)
class DecodeEnd:
    """The decode side of a connection after the Hello: what an intake is made of."""

    channel: Channel[ToDecode]
    slabs: Sequence[RankSlab]  # of ranks 0, 1, ...
    timeout_s: float  # for a meeting beside the connection


MakeWriter = Callable[[PrefillEnd], BlockWriter]
MakeIntake = Callable[[DecodeEnd], BlockIntake]


@dataclass(frozen=True, slots=True)
class Transport:
    """One way of KV blocks from a prefill worker's slab into a decode worker's."""

    name: str  # in the configuration, on the wire and in metrics
    memory: tuple[MemoryKind, ...]  # where the slabs of both workers may lie, each in any of these kinds
    socket: SocketKind  # what its messages go over; "unix": both workers are on one host
    load: Callable[[], tuple[MakeWriter, MakeIntake]]  # imports what it needs; either may raise OSError, BatonError
    obstacle: Callable[[], str] = str  # why this process can take no part in it; empty when it can
    plain: bool = False  # whether its bytes go from machine to machine without TLS


def piece_blocks(layout: SlabLayout) -> int:
    """How many blocks one message may announce where bytes go through host memory."""
    return max(1, min(MAX_PIECE_BYTES // layout.block_bytes, MAX_PIECE_BLOCKS))
