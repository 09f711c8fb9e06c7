"""Attention in plain torch, the reference and the backend on CPU: it gathers a sequence's blocks into one tensor."""

from collections.abc import Sequence as Run
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.attention import HeadNorms, Span
from engine.model.rope import RotaryEmbedding, rotate
from kvtransfer.slab.layout import SlabLayout

GATHER_BYTES = 4 * 1024 * 1024  # decodes share a gather up to this size, which fits into a CPU's caches


@dataclass(frozen=True, slots=True)
class _PrefillSpan:
    start: int
    end: int
    cache_rows: Tensor
    mask: Tensor | None  # [end - start, end], added to the scores; None: causal, because the span begins its sequence


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    size: int
    cache_rows: Tensor
    mask: Tensor  # [size, 1, 1, padded length], added to the scores


@dataclass(frozen=True, slots=True)
class TorchMetadata:
    angles: tuple[Tensor, Tensor]  # of `rotate`
    key_rows: Tensor  # [num_tokens * kv_heads] rows of the cache seen as [.., head_dim]
    prefill: list[_PrefillSpan]
    decode: list[_DecodeGroup]


class TorchAttention:
    """Implements `engine.model.attention.Attention` with torch's scaled_dot_product_attention.

    A layer's cache is viewed as a matrix whose row (block * kv_heads + head) * 2 + {0: K, 1: V} is one head of one
    block; one index_select of whole rows yields [2, kv_heads, length, head_dim].
    """

    def __init__(self, layout: SlabLayout, rotary: RotaryEmbedding, dtype: torch.dtype, device: torch.device) -> None:
        self._rotary = rotary
        self._kv_heads = layout.num_kv_heads
        self._block_size = layout.block_size
        self._head_dim = layout.head_dim
        self._dtype = dtype
        self._device = device
        # Kept from call to call, because the page faults of new memory of this size take longer than attention.
        self._gathered = torch.empty(0, layout.block_size * layout.head_dim, dtype=dtype, device=device)
        self._group_blocks = max(1, GATHER_BYTES // layout.block_bytes)

    def prepare(self, prefill: Run[Span], decode: Run[Span]) -> TorchMetadata:
        positions = np.concatenate([np.arange(span.start, span.end) for span in (*prefill, *decode)])
        return TorchMetadata(
            angles=self._rotary.angles(self._tensor(positions), self._dtype),
            key_rows=self._key_rows([*prefill, *decode]),
            prefill=[self._prefill_span(span) for span in prefill],
            decode=[self._decode_group(group) for group in self._grouped(decode)],
        )

    def store(self, qkv: Tensor, norms: HeadNorms | None, layer_cache: Tensor, metadata: TorchMetadata) -> Tensor:
        queries_keys, values = qkv[:, : -self._kv_heads], qkv[:, -self._kv_heads :]
        if norms is not None:
            queries_keys = torch.rms_norm(queries_keys, [self._head_dim], eps=norms.eps) * norms.each
        queries_keys = rotate(queries_keys, *metadata.angles)  # in one call for both
        queries, keys = queries_keys[:, : -self._kv_heads], queries_keys[:, -self._kv_heads :]
        rows = layer_cache.view(-1, self._head_dim)
        rows.index_copy_(0, metadata.key_rows, keys.reshape(-1, self._head_dim))
        rows.index_copy_(0, metadata.key_rows + self._block_size, values.reshape(-1, self._head_dim))
        return queries

    def store_and_decode(
        self, qkv: Tensor, norms: HeadNorms | None, layer_cache: Tensor, metadata: TorchMetadata
    ) -> Tensor:
        queries = self.store(qkv, norms, layer_cache, metadata)
        mixed = torch.empty_like(queries)
        self.decode(queries, layer_cache, metadata, mixed)
        return mixed

    def prefill(self, queries: Tensor, layer_cache: Tensor, metadata: TorchMetadata, out: Tensor) -> None:
        done = 0
        for span in metadata.prefill:
            length = span.end - span.start
            kv = self._gather(layer_cache, span.cache_rows, 1)[0, :, :, : span.end]
            # Heads are [kv_heads, group]: a group of query heads reads its KV head through a stride of 0.
            q = queries[done : done + length].view(length, self._kv_heads, -1, self._head_dim).permute(1, 2, 0, 3)
            k, v = kv[:, :, None].expand(-1, -1, q.shape[1], -1, -1)
            result = F.scaled_dot_product_attention(q, k, v, attn_mask=span.mask, is_causal=span.mask is None)
            out[done : done + length] = result.permute(2, 0, 1, 3).reshape(length, -1, self._head_dim)
            done += length

    def decode(self, queries: Tensor, layer_cache: Tensor, metadata: TorchMetadata, out: Tensor) -> None:
        done = 0
        for group in metadata.decode:
            k, v = self._gather(layer_cache, group.cache_rows, group.size).unbind(1)
            # The query heads of one KV head take the place of a prompt's tokens, because all of them see all keys.
            q = queries[done : done + group.size].view(group.size, self._kv_heads, -1, self._head_dim)
            result = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask)
            out[done : done + group.size] = result.reshape(group.size, -1, self._head_dim)
            done += group.size

    def _gather(self, layer_cache: Tensor, cache_rows: Tensor, size: int) -> Tensor:
        """[size, 2, kv_heads, padded length, head_dim]"""
        rows = layer_cache.view(-1, self._block_size * self._head_dim)
        if len(cache_rows) > len(self._gathered):
            self._gathered = rows.new_empty(len(cache_rows), rows.shape[1])
        gathered = self._gathered[: len(cache_rows)]
        torch.index_select(rows, 0, cache_rows, out=gathered)
        return gathered.view(size, 2, self._kv_heads, -1, self._head_dim)

    def _key_rows(self, spans: Run[Span]) -> Tensor:
        block_size = self._block_size
        firsts = []  # row of each token's key under head 0
        for span in spans:
            positions = np.arange(span.start, span.end)
            first_block = span.start // block_size
            touched = np.asarray(span.block_table[first_block : (span.end - 1) // block_size + 1])
            blocks = touched[positions // block_size - first_block]
            firsts.append(blocks * (self._kv_heads * 2 * block_size) + positions % block_size)
        heads = np.arange(self._kv_heads) * (2 * block_size)
        return self._tensor((np.concatenate(firsts)[:, None] + heads).ravel())

    def _cache_rows(self, tables: np.ndarray) -> Tensor:
        """The rows to gather for block tables [size, blocks], in the order [size, 2, kv_heads, blocks]."""
        part = np.arange(2)[:, None, None] + 2 * np.arange(self._kv_heads)[:, None]
        return self._tensor((tables[:, None, None, :] * (2 * self._kv_heads) + part).ravel())

    def _prefill_span(self, span: Span) -> _PrefillSpan:
        table = np.asarray(span.block_table[: self._num_blocks(span)])[None]
        mask = None
        if span.start:
            visible = torch.ones(span.end - span.start, span.end, dtype=torch.bool, device=self._device).tril(
                span.start
            )
            mask = self._additive(visible)
        return _PrefillSpan(span.start, span.end, self._cache_rows(table), mask)

    def _grouped(self, spans: Run[Span]) -> list[list[Span]]:
        """Neighbouring spans share a group while their padded gather is within GATHER_BYTES."""
        groups: list[list[Span]] = []
        longest = 0
        for span in spans:
            longest = max(longest, self._num_blocks(span))
            if not groups or (len(groups[-1]) + 1) * longest > self._group_blocks:
                groups.append([])
                longest = self._num_blocks(span)
            groups[-1].append(span)
        return groups

    def _decode_group(self, spans: list[Span]) -> _DecodeGroup:
        num_blocks = max(self._num_blocks(span) for span in spans)
        tables = np.zeros((len(spans), num_blocks), dtype=np.int64)  # padding reads block 0, and its scores are masked
        for row, span in zip(tables, spans, strict=True):
            row[: self._num_blocks(span)] = span.block_table[: self._num_blocks(span)]
        lengths = self._tensor(np.array([span.end for span in spans]))
        visible = torch.arange(num_blocks * self._block_size, device=self._device) < lengths[:, None]
        return _DecodeGroup(len(spans), self._cache_rows(tables), self._additive(visible)[:, None, None])

    def _num_blocks(self, span: Span) -> int:
        return -(-span.end // self._block_size)

    def _additive(self, visible: Tensor) -> Tensor:
        return torch.zeros(visible.shape, dtype=self._dtype, device=self._device).masked_fill_(~visible, float("-inf"))

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64, copy=False)).to(self._device)
