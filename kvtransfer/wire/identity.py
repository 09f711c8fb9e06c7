"""Who owns a slab and what its bytes mean: both ends of a connection compare it before the first byte moves."""

from dataclasses import dataclass, replace

from baton_proto import transfer as wire
from baton_proto.worker import Grant
from kvtransfer.slab.head_plan import SIZES, WHOLE, Shard, fits, heads_per_rank, sending_ranks
from kvtransfer.slab.layout import SlabLayout
from runtime.code_version import code_version
from runtime.errors import HandshakeError

SHARED_LAYOUT = ("dtype", "num_layers", "num_kv_heads", "block_size", "head_dim")  # what both ends must agree on


@dataclass(frozen=True, slots=True)
class SlabIdentity:
    worker_id: str
    incarnation: int
    model_hash: str
    layout: SlabLayout  # of a slab that would hold all of the model's KV heads
    shard: Shard = WHOLE  # the rank that says hello; of a receiver: rank 0, which speaks for all

    @property
    def slab_layout(self) -> SlabLayout:
        """The layout of each rank's slab."""
        return rank_layout(self.layout, self.shard.size)


def rank_layout(layout: SlabLayout, size: int) -> SlabLayout:
    """The layout of each of `size` ranks' slabs, which together hold what `layout` describes."""
    return replace(layout, num_kv_heads=heads_per_rank(size, layout.num_kv_heads))


def hello(identity: SlabIdentity, grant: Grant, transport: str) -> wire.Hello:
    """The sender's identity, and the receiver's as the grant names it. `transport`: that blocks shall come by."""
    layout = identity.layout
    return wire.Hello(
        version=wire.MAJOR,
        sender=identity.worker_id,
        worker_id=grant.worker_id,
        incarnation=grant.incarnation,
        generation=grant.generation,
        model_hash=identity.model_hash,
        **{field: getattr(layout, field) for field in SHARED_LAYOUT},
        rank=identity.shard.rank,
        size=identity.shard.size,
        transport=transport,
        code=code_version(),
    )


def check_hello(said: wire.Hello, identity: SlabIdentity, generation: int) -> None:
    """Raises HandshakeError naming the first field in which a sender's idea of this slab is wrong.

    The number of blocks may differ, because each side addresses its own slab by its own block ids.
    """
    layout = identity.layout
    for field, ours, theirs in (
        ("protocol version", wire.MAJOR, said.version),
        ("version of Baton", code_version(), said.code),
        ("worker_id", identity.worker_id, said.worker_id),
        ("incarnation", identity.incarnation, said.incarnation),
        ("generation", generation, said.generation),
        ("model_hash", identity.model_hash, said.model_hash),
        *((field, getattr(layout, field), getattr(said, field)) for field in SHARED_LAYOUT),
    ):
        if ours != theirs:
            raise HandshakeError(field, ours, theirs)
    if not fits(said.size, layout.num_kv_heads):
        heads = layout.num_kv_heads
        raise HandshakeError("size", f"one of {SIZES}, for {heads} KV heads a multiple or a divisor", said.size)
    senders = sending_ranks(said.size, layout.num_kv_heads)
    if said.rank not in senders:
        raise HandshakeError("rank", f"one of {senders}", said.rank)
