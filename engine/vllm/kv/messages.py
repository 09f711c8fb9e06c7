"""What a worker process and the process of vLLM that computes for it say to each other about KV blocks that other
workers send or fetch. One message is one packet of a Unix socket.

Invariant: every Reserved is answered with one Arrived or Refused, and every prompt that was to be sent with one Sent;
until then vLLM keeps the blocks.
"""

from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from msgspec import Struct

from baton_proto.decoding import Count, Name, Rows, Small, decoder

BlockIds = Annotated[list[Small], Rows]


class CacheMemory(Struct, frozen=True, tag="cache"):
    """vLLM's first message, with a descriptor of the memory in which its KV cache lies: a slab.

    `form`: all that the bytes of a head depend on beside these numbers, equal where they may be copied as they are.
    """

    num_layers: Count
    num_blocks: Count
    num_kv_heads: Count
    block_size: Count
    head_dim: Count
    dtype: Name
    form: Name
    device: Literal["cpu", "cuda"] = "cpu"


class Unshared(Struct, frozen=True, tag="unshared"):
    """vLLM's first message where its KV cache cannot be shared."""

    reason: Name


class Reserved(Struct, frozen=True, tag="reserved"):
    """A request whose prompt another worker computes has its blocks, and waits. `skip_tokens`: whole blocks of the
    prompt that are cached here; they are in the list, too."""

    request_id: Name
    block_ids: BlockIds
    skip_tokens: Count


class Chunk(Struct, frozen=True):
    """Tokens [start, end) of a prompt that this step computes, and the blocks that it got for them."""

    request_id: Name
    start: Count
    end: Count
    new_block_ids: BlockIds


class StepBegins(Struct, frozen=True, tag="begins"):
    """A step computes chunks of prompts whose KV is sent. `lost`: prompts that were preempted, so that others have
    their blocks now."""

    chunks: Annotated[list[Chunk], Rows]
    lost: Annotated[list[Name], Rows] = []


class LayerComputed(Struct, frozen=True, tag="layer"):
    """The step has written the KV of this layer; `ends`: and of all others."""

    layer: Small
    ends: bool = False


class Arrived(Struct, frozen=True, tag="arrived"):
    """The KV of a request that was Reserved is in its blocks."""

    request_id: Name


class Refused(Struct, frozen=True, tag="refused"):
    """The KV of a request that was Reserved does not come, and nobody writes these blocks any more."""

    request_id: Name
    block_ids: BlockIds


class Sent(Struct, frozen=True, tag="sent"):
    """Nobody reads the blocks of a prompt any more."""

    request_id: Name


FromVllm = CacheMemory | Unshared | Reserved | StepBegins | LayerComputed
ToVllm = Arrived | Refused | Sent

encode: Callable[[FromVllm | ToVllm], bytes] = msgspec.msgpack.Encoder().encode
decode_from_vllm: Callable[[bytes | bytearray], FromVllm] = decoder(FromVllm)
decode_to_vllm: Callable[[bytes | bytearray], ToVllm] = decoder(ToVllm)
