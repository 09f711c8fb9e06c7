"""Ranks of a prefill worker that keep to the protocol exactly as far as a test wants, and a decode worker for them."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from baton_proto import transfer as wire
from baton_proto.worker import Grant
from kvtransfer.decode_side.events import LayerArrived
from kvtransfer.slab.head_plan import Shard
from kvtransfer.wire.identity import SlabIdentity
from tests.kvtransfer.peers import RawPeer
from tests.kvtransfer.ranks import LAYOUT, DecodeRanks, config_of


@contextmanager
def decode_worker(transport: str, num_kv_heads: int = 8) -> Iterator[DecodeRanks]:
    with closing(DecodeRanks([], num_kv_heads, config_of(transport))) as decode:
        yield decode


def identity(rank: int, size: int, num_kv_heads: int = 8) -> SlabIdentity:
    return SlabIdentity("prefill-0", 3, "model", replace(LAYOUT, num_kv_heads=num_kv_heads), Shard(rank, size))


def raw_rank(grant: Grant, transport: str, rank: int, size: int) -> RawPeer:
    return RawPeer(grant, unix=transport == "shm", identity=identity(rank, size))


def drain(peer: RawPeer) -> None:
    """Returns when the decode worker has taken it in: it answers in order."""
    peer.channel.send(wire.Drained(peer.grant.transfer_id))
    peer.channel.send(wire.Begin("nobody's", 1, checksum=False))
    assert isinstance(peer.channel.receive(), wire.Reject)


def kinds(decode: DecodeRanks, grant: Grant) -> list[type]:
    return [type(event) for event in decode.of(grant.transfer_id) if not isinstance(event, LayerArrived)]
