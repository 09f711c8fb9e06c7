"""The messages of a KV connection between a prefill and a decode worker; kvtransfer/wire/framing.py frames them.

Block bytes are never inside a message: a transport puts them in place before `Blocks` is sent (shm, cuda_ipc), sends
them raw behind it (tcp), or sends them beside the connection (nccl).
"""

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from baton_proto.decoding import Count, Name, Packed, decoder
from baton_proto.timeline import Pushes

MAJOR = 2

MAX_REASON = 4096
Reason = Annotated[str, Meta(max_length=MAX_REASON)]
Rendezvous = Annotated[bytes, Meta(max_length=1024)]

# --- prefill -> decode ------------------------------------------------------------------------------------------------


class Hello(Struct, frozen=True, tag="hello"):
    """Opens a connection from a rank of a prefill worker to a decode worker, whose rank 0 speaks for all of its ranks.

    Worker id, incarnation and generation are the receiver's, as the grant says them.
    """

    version: Count
    sender: Name
    worker_id: Name
    incarnation: Count
    generation: Count
    model_hash: Name
    dtype: Name
    num_layers: Count
    num_kv_heads: Count  # of the model, in however many ranks they lie
    block_size: Count
    head_dim: Count
    rank: Count
    size: Count  # ranks of the sender
    transport: Name = ""  # by which block bytes shall come: one that the grant's endpoint offers; version 1 had none
    code: Name = ""  # the sender's version of Baton


class Begin(Struct, frozen=True, tag="begin"):
    """Asks for leave to write. Nothing is written before the Accept. Every rank that has heads to send begins."""

    transfer_id: Name
    num_blocks: Count
    checksum: bool  # every Blocks of this transfer carries checksums


class Blocks(Struct, frozen=True, tag="blocks"):
    """Granted blocks [first, first + count) of layers [layer, layer + layers) are in place (shm, cuda_ipc) or follow.

    tcp sends a message for each layer, and behind it the layer part by part (kvtransfer/slab/head_plan.py): the first
    part's heads of every block, then the second part's. nccl: see kvtransfer/transports/nccl.py.
    """

    transfer_id: Name
    layer: Count
    first: Count
    count: Count
    layers: Count = 1
    checksums: Packed = b""  # xxh3_64 per layer, part and block, u64 LE

    @property
    def layer_range(self) -> range:
        return range(self.layer, self.layer + self.layers)


class Commit(Struct, frozen=True, tag="commit"):
    """This rank has sent all blocks of all layers. Rank 0's payload is a `FirstToken`. Times: since this rank began."""

    transfer_id: Name
    payload: Packed
    sent_us: Count = 0  # when this message left
    pushes: Pushes = []


class Abort(Struct, frozen=True, tag="abort"):
    """The sender gives up; it has written its last byte."""

    transfer_id: Name
    reason: Reason


class Drained(Struct, frozen=True, tag="drained"):
    """Answer to Cancel: the sender has written its last byte."""

    transfer_id: Name


ToDecode = Hello | Begin | Blocks | Commit | Abort | Drained

# --- decode -> prefill ------------------------------------------------------------------------------------------------


class Welcome(Struct, frozen=True, tag="welcome"):
    """The slabs fit together. Over a Unix socket file descriptors come along, see kvtransfer/transports/mapped.py."""

    version: Count
    num_blocks: Count  # of each of the receiver's slabs
    size: Count  # ranks of the receiver
    num_window_blocks: Count = 0  # of those of layers with a window
    rendezvous: Rendezvous = b""  # by which sender and receiver meet beside the connection; nccl: the id of the pair


class Refused(Struct, frozen=True, tag="refused"):
    """The slabs do not fit together; the connection ends. `ours` is the decode worker's value."""

    field: Name
    ours: Name
    theirs: Name


class Accept(Struct, frozen=True, tag="accept"):
    transfer_id: Name


class Reject(Struct, frozen=True, tag="reject"):
    """No lease for this transfer, or no longer; it may not be written."""

    transfer_id: Name
    reason: Reason


class Cancel(Struct, frozen=True, tag="cancel"):
    """Stop writing and answer Drained."""

    transfer_id: Name
    reason: Reason


class Committed(Struct, frozen=True, tag="committed"):
    """All blocks of this rank arrived. After the last rank's Committed they belong to the decode worker's sequence."""

    transfer_id: Name


ToPrefill = Welcome | Refused | Accept | Reject | Cancel | Committed

decode_to_decode = decoder(ToDecode)
decode_to_prefill = decoder(ToPrefill)
encode: Callable[[ToDecode | ToPrefill], bytes] = msgspec.msgpack.Encoder().encode
