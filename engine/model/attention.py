"""Attention over the paged KV cache: the interface of backends, and its binding to one step.

A layer's cache is `caches[layer]`: [num_blocks, kv_heads, 2 (K, V), block_size, head_dim], contiguous. Layers with a
window may have fewer blocks than the others, and block tables of their own.
"""

from collections.abc import Callable, Sequence as Run
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.sequences.moves import Move


class Span(NamedTuple):
    """Tokens [start, end) of one sequence, which go through the model; `block_table` covers [0, end)."""

    start: int
    end: int
    block_table: Run[int]
    window_table: Run[int] = ()  # the same in layers with a window; empty: they have no blocks of their own


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of single heads, applied before rotation."""

    query: Tensor  # [head_dim]
    key: Tensor  # [head_dim]
    each: Tensor  # [heads + kv_heads, head_dim]: both repeated, for one multiplication of queries and keys
    eps: float


class Attention(Protocol):
    """A backend. For each layer of a step, `store` comes before `prefill` and `decode`.

    Tokens lie flat: those of the prefill spans first, then one per decode span. Queries and results are
    [num_tokens, heads, head_dim]. A query sees its sequence up to itself. `metadata`, of the backend's own type, is
    shared by all layers of a step; most of it is indices on the device.
    """

    def store(self, qkv: Tensor, norms: HeadNorms | None, layer_cache: Tensor, metadata: Any) -> Tensor:
        """Normalises and rotates [num_tokens, heads + 2 * kv_heads, head_dim], which may be overwritten, and writes
        keys and values into the blocks of the spans. Returns the queries."""

    def store_and_decode(self, qkv: Tensor, norms: HeadNorms | None, layer_cache: Tensor, metadata: Any) -> Tensor:
        """`store` and `decode` for a step of decodes alone; a backend may fuse them."""

    def prefill(self, queries: Tensor, layer_cache: Tensor, metadata: Any, out: Tensor) -> None:
        """Attends with the queries of the prefill spans, in order. `out`: contiguous, of the same shape."""

    def decode(self, queries: Tensor, layer_cache: Tensor, metadata: Any, out: Tensor) -> None:
        """Attends with one query per decode span, in order."""


class LayerAttention(NamedTuple):
    backend: Attention
    metadata: Any  # of `backend`, for one step


class Caches(Protocol):
    """The cache of each layer: a list, or a tensor whose first dimension is the layers."""

    def __getitem__(self, layer: int, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class StepAttention:
    """What a model calls in each layer of one step. The model itself knows no sequences, blocks or phases."""

    layers: Run[LayerAttention]  # of each layer
    caches: Caches
    num_prefill_tokens: int
    layer_done: Callable[[int], None] | None  # called when a layer's KV is written
    moves: Run[Move] = ()  # that the step's work in each layer comes after

    def __call__(self, layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        """[num_tokens, heads + 2 * kv_heads, head_dim] -> [num_tokens, heads, head_dim]"""
        self.begin(layer)
        if self.num_prefill_tokens == 0:
            backend, metadata = self.layers[layer]
            decoded = backend.store_and_decode(qkv, norms, self.caches[layer], metadata)
            self.tell(layer)
            return decoded
        queries = self.store(layer, qkv, norms)
        self.tell(layer)
        mixed = torch.empty_like(queries, memory_format=torch.contiguous_format)
        self.mix(layer, queries, mixed)
        return mixed

    def begin(self, layer: int) -> None:
        """Lets the layer come after its moves; called before anything of it runs."""
        for move in self.moves:
            move.before(layer)

    def store(self, layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        """Begins attention in a step with prompts: see `Attention.store`."""
        backend, metadata = self.layers[layer]
        return backend.store(qkv, norms, self.caches[layer], metadata)

    def mix(self, layer: int, queries: Tensor, mixed: Tensor) -> None:
        """Attends in a step with prompts. mixed: [num_tokens, heads, head_dim], takes the result."""
        split, cache = self.num_prefill_tokens, self.caches[layer]
        backend, metadata = self.layers[layer]
        backend.prefill(queries[:split], cache, metadata, mixed[:split])
        if split < len(queries):
            backend.decode(queries[split:], cache, metadata, mixed[split:])

    def tell(self, layer: int) -> None:
        """Tells that the layer's KV is written."""
        if self.layer_done is not None:
            self.layer_done(layer)
