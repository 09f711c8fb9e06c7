"""Attention in plain torch, the reference and the backend on CPU: it gathers a sequence's blocks into one tensor."""

import dataclasses
from collections.abc import Sequence as Run
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.attention import HeadNorms, LayerAttention, Span
from engine.model.fp8_matrix import F8, F8_MAX
from engine.model.rope import RotaryEmbedding, rotate
from kvtransfer.slab.layout import SlabLayout
from runtime.checkpoint.families import FAMILIES
from runtime.checkpoint.model_config import ModelConfig
from runtime.checkpoint.rope_config import Rope

GATHER_BYTES = 4 * 1024 * 1024  # decodes share a gather up to this size, which fits into a CPU's caches


@dataclass(frozen=True, slots=True)
class _PrefillSpan:
    start: int
    end: int
    num_keys: int  # up to `end`, from the first block that a token of the span sees
    cache_rows: Tensor
    mask: Tensor | None  # [end - start, num_keys], added to the scores; None: causal, as the span begins its sequence


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    size: int
    cache_rows: Tensor
    mask: Tensor  # [size, 1, 1, padded length], added to the scores


@dataclass(frozen=True, slots=True)
class TorchMetadata:
    angles: tuple[Tensor, Tensor] | None  # of `rotate`
    query_scales: Tensor | None  # [num_tokens, 1, 1]
    key_rows: Tensor  # [num_tokens * kv_heads] rows of the cache seen as [.., head_dim]
    prefill: list[_PrefillSpan]
    decode: list[_DecodeGroup]
    sinks: Tensor | None = None  # [kv_heads, group, 1] of the layer; see LlamaLayer


class TorchAttention:
    """Implements `engine.model.attention.Attention` with torch's scaled_dot_product_attention.

    A layer's cache is viewed as a matrix whose row (block * kv_heads + head) * 2 + {0: K, 1: V} is one head of one
    block; one index_select of whole rows yields [2, kv_heads, length, head_dim].
    """

    def __init__(
        self,
        layout: SlabLayout,
        rotary: RotaryEmbedding | None,
        dtype: torch.dtype,
        device: torch.device,
        *,
        window: int = 0,
        softcap: float = 0.0,
        has_sinks: bool = False,
    ) -> None:
        """rotary: None: heads are not rotated. window: as many tokens as one sees, itself included; 0: all before it.
        softcap: scores are cap * tanh(score / cap); 0: as they are."""
        self._rotary = rotary
        self._window = window
        self._softcap = softcap
        self._needs_scores = has_sinks or softcap > 0
        self._kv_heads = layout.num_kv_heads
        self._block_size = layout.block_size
        self._head_dim = layout.head_dim
        self._dtype = dtype
        self._device = device
        # Kept from call to call, because the page faults of new memory of this size take longer than attention.
        self._gathered = torch.empty(0, layout.block_size * layout.head_dim, device=device)
        self._group_blocks = max(1, GATHER_BYTES // layout.block_bytes)

    def prepare(self, prefill: Run[Span], decode: Run[Span]) -> TorchMetadata:
        positions = self._tensor(np.concatenate([np.arange(span.start, span.end) for span in (*prefill, *decode)]))
        rotary, dtype = self._rotary, self._dtype
        return TorchMetadata(
            angles=None if rotary is None else rotary.angles(positions, dtype),
            query_scales=None if rotary is None else rotary.query_scales(positions, dtype),
            key_rows=self._key_rows([*prefill, *decode]),
            prefill=[self._prefill_span(span) for span in prefill],
            decode=[self._decode_group(group) for group in self._grouped(decode)],
        )

    def with_sinks(self, metadata: TorchMetadata, sinks: Tensor | None) -> TorchMetadata:
        """sinks: [heads] of a layer."""
        if sinks is None:
            return metadata
        return dataclasses.replace(metadata, sinks=sinks.view(self._kv_heads, -1, 1))

    def store(self, qkv: Tensor, norms: HeadNorms | None, layer_cache: Tensor, metadata: TorchMetadata) -> Tensor:
        queries_keys, values = qkv[:, : -self._kv_heads], qkv[:, -self._kv_heads :]
        if norms is not None:
            queries_keys = torch.rms_norm(queries_keys, [self._head_dim], eps=norms.eps) * norms.each
        if metadata.angles is not None:
            queries_keys = rotate(queries_keys, *metadata.angles)  # in one call for both
        queries, keys = queries_keys[:, : -self._kv_heads], queries_keys[:, -self._kv_heads :]
        if metadata.query_scales is not None:
            queries = queries * metadata.query_scales
        rows = _movable(layer_cache).view(-1, self._head_dim)
        rows.index_copy_(0, metadata.key_rows, self._stored(keys, layer_cache))
        rows.index_copy_(0, metadata.key_rows + self._block_size, self._stored(values, layer_cache))
        return queries

    def _stored(self, heads: Tensor, layer_cache: Tensor) -> Tensor:
        """Rows of `_movable(layer_cache)`."""
        rows = heads.reshape(-1, self._head_dim)
        return _movable(rows.clamp(-F8_MAX, F8_MAX).to(F8)) if layer_cache.dtype == F8 else rows

    def store_and_decode(
        self, qkv: Tensor, norms: HeadNorms | None, layer_cache: Tensor, metadata: TorchMetadata
    ) -> Tensor:
        queries = self.store(qkv, norms, layer_cache, metadata)
        mixed = torch.empty_like(queries)
        self.decode(queries, layer_cache, metadata, mixed)
        return mixed

    def prefill(self, queries: Tensor, layer_cache: Tensor, metadata: TorchMetadata, out: Tensor) -> None:
        done = 0
        sinks = None if metadata.sinks is None else metadata.sinks[..., None]
        for span in metadata.prefill:
            length = span.end - span.start
            kv = self._gather(layer_cache, span.cache_rows, 1)[0, :, :, : span.num_keys]
            # Heads are [kv_heads, group]: a group of query heads reads its KV head through a stride of 0.
            q = queries[done : done + length].view(length, self._kv_heads, -1, self._head_dim).permute(1, 2, 0, 3)
            k, v = kv[:, :, None].expand(-1, -1, q.shape[1], -1, -1)
            result = self._attend(q, k, v, span.mask, sinks)
            out[done : done + length] = result.permute(2, 0, 1, 3).reshape(length, -1, self._head_dim)
            done += length

    def decode(self, queries: Tensor, layer_cache: Tensor, metadata: TorchMetadata, out: Tensor) -> None:
        done = 0
        for group in metadata.decode:
            k, v = self._gather(layer_cache, group.cache_rows, group.size).unbind(1)
            # The query heads of one KV head take the place of a prompt's tokens, because all of them see all keys.
            q = queries[done : done + group.size].view(group.size, self._kv_heads, -1, self._head_dim)
            result = self._attend(q, k, v, group.mask, metadata.sinks)
            out[done : done + group.size] = result.reshape(group.size, -1, self._head_dim)
            done += group.size

    def _attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, sinks: Tensor | None
    ) -> Tensor:
        """mask: None: causal. sinks: as many dimensions as scores have."""
        if not self._needs_scores:
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None)
        cap = self._softcap or 1.0
        scores = queries @ keys.transpose(-1, -2) / (cap * self._head_dim**0.5)
        scores = (scores.tanh() * cap if self._softcap else scores) + mask
        if sinks is not None:
            scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
        weights = scores.softmax(-1, dtype=torch.float32).to(self._dtype)
        return torch.matmul(weights[..., : keys.shape[-2]], values)

    def _gather(self, layer_cache: Tensor, cache_rows: Tensor, size: int) -> Tensor:
        """[size, 2, kv_heads, padded length, head_dim]"""
        rows = _movable(layer_cache).view(-1, self._block_size * self._head_dim)
        if len(cache_rows) > len(self._gathered):
            self._gathered = rows.new_empty(len(cache_rows), rows.shape[1])
        gathered = self._gathered[: len(cache_rows)]
        torch.index_select(rows, 0, cache_rows, out=gathered)
        values = gathered.view(size, 2, self._kv_heads, -1, self._head_dim)
        return values.view(F8).to(self._dtype) if layer_cache.dtype == F8 else values

    def _key_rows(self, spans: Run[Span]) -> Tensor:
        block_size = self._block_size
        firsts = []  # row of each token's key under head 0
        for span in spans:
            positions = np.arange(span.start, span.end)
            first_block = span.start // block_size
            touched = np.asarray(self._table(span)[first_block : (span.end - 1) // block_size + 1])
            blocks = touched[positions // block_size - first_block]
            firsts.append(blocks * (self._kv_heads * 2 * block_size) + positions % block_size)
        heads = np.arange(self._kv_heads) * (2 * block_size)
        return self._tensor((np.concatenate(firsts)[:, None] + heads).ravel())

    def _cache_rows(self, tables: np.ndarray) -> Tensor:
        """The rows to gather for block tables [size, blocks], in the order [size, 2, kv_heads, blocks]."""
        part = np.arange(2)[:, None, None] + 2 * np.arange(self._kv_heads)[:, None]
        return self._tensor((tables[:, None, None, :] * (2 * self._kv_heads) + part).ravel())

    def _prefill_span(self, span: Span) -> _PrefillSpan:
        first = self._first_block(span)
        table = np.asarray(self._table(span)[first : self._end_block(span)])[None]
        begin, mask = first * self._block_size, None
        if span.start or self._needs_scores or 0 < self._window < span.end:
            positions = torch.arange(begin, span.end, device=self._device)
            mask = self._additive(self._visible(positions[span.start - begin :, None], positions))
        return _PrefillSpan(span.start, span.end, span.end - begin, self._cache_rows(table), mask)

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
            row[: self._num_blocks(span)] = self._table(span)[self._first_block(span) : self._end_block(span)]
        # Positions in what is gathered, which begins with another block in each row.
        newest = self._tensor(np.array([span.end - 1 - self._first_block(span) * self._block_size for span in spans]))
        visible = self._visible(newest[:, None], torch.arange(num_blocks * self._block_size, device=self._device))
        return _DecodeGroup(len(spans), self._cache_rows(tables), self._additive(visible)[:, None, None])

    def _visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether the token at a position of `queries` sees that at a position of `keys`."""
        behind = queries - keys
        return (behind >= 0) & (behind < self._window) if self._window else behind >= 0

    def _table(self, span: Span) -> Run[int]:
        return span.window_table if self._window and span.window_table else span.block_table

    def _num_blocks(self, span: Span) -> int:
        return self._end_block(span) - self._first_block(span)

    def _first_block(self, span: Span) -> int:
        """The first block that the span's first token sees."""
        return max(0, span.start - self._window + 1) // self._block_size if self._window else 0

    def _end_block(self, span: Span) -> int:
        return -(-span.end // self._block_size)

    def _additive(self, visible: Tensor) -> Tensor:
        return torch.zeros(visible.shape, dtype=self._dtype, device=self._device).masked_fill_(~visible, float("-inf"))

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64, copy=False)).to(self._device)


def _movable(values: Tensor) -> Tensor:
    """As bytes, where torch cannot choose rows of the numbers."""
    return values.view(torch.uint8) if values.dtype == F8 else values


def torch_attentions(
    config: ModelConfig, layout: SlabLayout, dtype: torch.dtype, device: torch.device
) -> list[TorchAttention]:
    """Of each layer; layers that attend alike have the same."""
    alike: dict[tuple[Rope | None, int], TorchAttention] = {}
    attentions, has_sinks = [], FAMILIES[config.architecture].has_sinks
    for layer in range(config.num_layers):
        kind = rope, window = config.rope_of(layer), config.window(layer)
        if kind not in alike:
            rotary = None if rope is None else RotaryEmbedding(rope, device)
            alike[kind] = TorchAttention(
                layout, rotary, dtype, device, window=window, softcap=config.attention_softcap, has_sinks=has_sinks
            )
        attentions.append(alike[kind])
    return attentions


def prepare(
    attentions: Run[TorchAttention], sinks: Run[Tensor | None], prefill: Run[Span], decode: Run[Span]
) -> list[LayerAttention]:
    """Binds each layer's attention and sinks to a step; layers that attend alike share the rest."""
    alike = {one: one.prepare(prefill, decode) for one in set(attentions)}
    return [LayerAttention(one, one.with_sinks(alike[one], own)) for one, own in zip(attentions, sinks, strict=True)]
