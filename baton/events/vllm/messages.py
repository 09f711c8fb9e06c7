"""The KV event messages that vLLM publishes over ZeroMQ, as far as a prefix index needs them.

vLLM encodes its batches with msgspec as msgpack: released versions as arrays, in which trailing fields with their
default may be missing, newer ones as maps. Both are read here, and further fields are ignored.
Format: vllm/distributed/kv_events.py in github.com/vllm-project/vllm.
"""

from typing import Any

import msgspec
from msgspec import Struct

from baton_proto.decoding import decoder
from runtime.errors import ProtocolError

BlockHash = int | bytes  # depends on vLLM's hash function; here it is only a name


class BlockStored(Struct, frozen=True, tag="BlockStored"):
    """A run of full blocks, each the child of the one before."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]  # of these blocks
    block_size: int
    lora_id: int | None = None
    medium: str | None = None  # None or "GPU": the cache that prefixes are served from
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None  # by block: what its hash covers beside the tokens
    group_idx: int | None = None  # of models with several kinds of attention, each with a cache of its own


class BlockRemoved(Struct, frozen=True, tag="BlockRemoved"):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(Struct, frozen=True, tag="AllBlocksCleared"):
    pass


VllmEvent = BlockStored | BlockRemoved | AllBlocksCleared


class VllmBatch(Struct, frozen=True):
    ts: float  # Unix time
    events: list[VllmEvent]
    data_parallel_rank: int | None = None


class _StoredArray(BlockStored, frozen=True, array_like=True, tag="BlockStored"):
    pass


class _RemovedArray(BlockRemoved, frozen=True, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedArray(AllBlocksCleared, frozen=True, array_like=True, tag="AllBlocksCleared"):
    pass


class _BatchArray(Struct, frozen=True, array_like=True):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]
    data_parallel_rank: int | None = None


_decode_map = decoder(VllmBatch)
_decode_array = decoder(_BatchArray)


def decode_vllm_batch(payload: bytes) -> VllmBatch:
    """Raises ProtocolError."""
    try:
        if _is_map(payload):
            whole: VllmBatch = _decode_map(payload)
            return whole
        batch: _BatchArray = _decode_array(payload)
        return VllmBatch(batch.ts, list(batch.events), batch.data_parallel_rank)
    except msgspec.DecodeError as error:
        raise ProtocolError("vLLM", f"a message that is no batch of KV events: {error}") from error


def _is_map(payload: bytes) -> bool:
    """A msgpack map begins with fixmap, map 16 or map 32."""
    return payload[:1] in (b"\xde", b"\xdf") or (payload[:1] != b"" and payload[0] & 0xF0 == 0x80)
