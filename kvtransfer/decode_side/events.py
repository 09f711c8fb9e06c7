"""What a receiver tells its owner about transfers, in order, from its own threads."""

from dataclasses import dataclass, field

from baton_proto.timeline import PushedChunk


@dataclass(frozen=True, slots=True)
class LayerArrived:
    """One sending rank's heads of `blocks` more granted blocks are in the slabs, or on their way (nccl), in each of
    layers [layer, layer + layers)."""

    transfer_id: str
    layer: int
    blocks: int
    rank: int = 0
    layers: int = 1


@dataclass(frozen=True, slots=True)
class Committed:
    """Every block of every layer is in every slab and the blocks belong to the owner's sequence. Ends the lease."""

    transfer_id: str
    payload: bytes
    transport: str
    kv_blocks: int
    kv_bytes: int
    sent_us: int = field(default=0, compare=False)  # when rank 0's commit left, since it began
    pushes: list[PushedChunk] = field(default_factory=list, compare=False)  # of all ranks, each since it began


@dataclass(frozen=True, slots=True)
class Failed:
    """No commit will come, for a reason other than the owner's own cancel(). Released follows, maybe much later."""

    transfer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Released:
    """Nobody can write the blocks any more; the owner may reuse them. Ends the lease."""

    transfer_id: str


TransferEvent = LayerArrived | Committed | Failed | Released
