"""The KV event messages that vLLM publishes over ZeroMQ, as far as a prefix index needs them.

vLLM encodes a batch with msgspec as msgpack, in a form that depends on its version:

- up to 0.2x: the batch is an array, and so is each event, with its kind first
- 0.32: the batch is an array whose events are maps, with their kind under `type`
- a batch that is a map too has been announced

Every mixture is read. Trailing fields with their default may be missing, and further fields are ignored.
Format: vllm/distributed/kv_events.py in github.com/vllm-project/vllm.
"""

from collections.abc import Callable
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
    kv_cache_spec_kind: str | None = None  # of the group; older versions do not tell it


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


class _BatchMap(Struct, frozen=True):
    """A batch whose events are not decoded yet."""

    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _BatchArray(_BatchMap, frozen=True, array_like=True):
    pass


Decode = Callable[[bytes | msgspec.Raw], Any]

_decode_batch: dict[bool, Decode] = {True: decoder(_BatchMap), False: decoder(_BatchArray)}  # by: is it a map?
_decode_event: dict[bool, Decode] = {
    True: decoder(BlockStored | BlockRemoved | AllBlocksCleared),
    False: decoder(_StoredArray | _RemovedArray | _ClearedArray),
}


def decode_vllm_batch(payload: bytes) -> VllmBatch:
    """Raises ProtocolError."""
    try:
        batch: _BatchMap = _decode_batch[_is_map(payload)](payload)
        events = [_decode_event[_is_map(memoryview(event))](event) for event in batch.events]
    except msgspec.DecodeError as error:
        raise ProtocolError("vLLM", f"a message that is no batch of KV events: {error}") from error
    return VllmBatch(batch.ts, events, batch.data_parallel_rank)


def _is_map(data: bytes | memoryview) -> bool:
    """A msgpack map begins with fixmap, map 16 or map 32."""
    return len(data) > 0 and (data[0] & 0xF0 == 0x80 or data[0] in (0xDE, 0xDF))
