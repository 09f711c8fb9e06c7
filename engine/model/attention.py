"""Attention over the paged KV cache: the interface, split by phase, and what binds it to one step of the model.

A layer's cache is `slab[layer]`: [num_blocks, kv_heads, 2 (K, V), block_size, head_dim], contiguous.
"""

from collections.abc import Callable, Sequence as Run
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Span(NamedTuple):
    """Tokens [start, end) of one sequence go through the model; `block_table` covers [0, end)."""

    start: int
    end: int
    block_table: Run[int]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of single heads, before they are rotated (Qwen3)."""

    query: Tensor  # [head_dim]
    key: Tensor  # [head_dim]
    each: Tensor  # [heads + kv_heads, head_dim], the two repeated: one multiplication for queries and keys
    eps: float


class Attention(Protocol):
    """A backend. For each layer of a step `store` comes before `prefill` and `decode`.

    Tokens lie flat: those of the prefill spans first, then one per decode span. Queries and results are
    [num_tokens, heads, head_dim]. A query sees its sequence up to itself. `metadata` is what all layers of one step
    share, indices on the device mostly; its type is the backend's own.
    """

    def store(self, qkv: Tensor, norms: HeadNorms | None, layer_cache: Tensor, metadata: Any) -> Tensor:
        """Queries that are ready for attention, from [num_tokens, heads + 2 * kv_heads, head_dim], which may be
        overwritten; normalises, rotates, and writes the step's keys and values into the blocks of its spans."""
        ...

    def store_and_decode(self, qkv: Tensor, norms: HeadNorms | None, layer_cache: Tensor, metadata: Any) -> Tensor:
        """Both for a step of decodes alone, where a backend may do them at once."""
        ...

    def prefill(self, queries: Tensor, layer_cache: Tensor, metadata: Any, out: Tensor) -> None:
        """The prefill spans' queries, in order. `out`: contiguous, as large."""
        ...

    def decode(self, queries: Tensor, layer_cache: Tensor, metadata: Any, out: Tensor) -> None:
        """One query per decode span, in order."""
        ...


@dataclass(frozen=True, slots=True)
class StepAttention:
    """What a model calls in each layer of one step: it knows neither sequences nor blocks nor phases."""

    backend: Attention
    metadata: Any  # of `backend`
    slab: Tensor  # [layers, blocks, kv_heads, 2, block_size, head_dim]
    num_prefill_tokens: int
    layer_done: Callable[[int], None] | None  # called as soon as a layer's KV is written
    mixed: Tensor | None = None  # [num_tokens, heads, head_dim], of a step with prompts: where each layer's result goes

    def __call__(self, layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        """[num_tokens, heads, head_dim] from [num_tokens, heads + 2 * kv_heads, head_dim]."""
        cache, split = self.slab[layer], self.num_prefill_tokens
        if split == 0:
            decoded = self.backend.store_and_decode(qkv, norms, cache, self.metadata)
            self._tell(layer)
            return decoded
        queries = self.backend.store(qkv, norms, cache, self.metadata)
        self._tell(layer)
        if self.mixed is None:
            mixed = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        else:
            mixed = self.mixed
        self.backend.prefill(queries[:split], cache, self.metadata, mixed[:split])
        if split < len(queries):
            self.backend.decode(queries[split:], cache, self.metadata, mixed[split:])
        return mixed

    def _tell(self, layer: int) -> None:
        if self.layer_done is not None:
            self.layer_done(layer)
