"""What the kernels compute, in plain torch and mostly in float64."""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.attention.rotate_store import Rotation
from engine.kernels.attention.scores import PLAIN, Scores
from engine.kernels.philox import uniform_rows
from engine.model.rope import rotate


def embed_reference(token_ids: Tensor, sampled: Tensor, table: Tensor) -> Tensor:
    known = torch.where(token_ids < 0, sampled[(-1 - token_ids).clamp(min=0).long()], token_ids)
    return table[known.long()]


def rms_norm_reference(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.rms_norm(hidden.double(), weight.shape, weight.double(), eps)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def small_linear_reference(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    add_to: Tensor | None = None,
) -> Tensor:
    wide = x.double()
    if norm is not None:
        wide = torch.rms_norm(wide, norm.shape, norm.double(), eps)
    product = wide @ weight.double().t()
    if gated:
        gate, up = product.chunk(2, dim=-1)
        product = F.silu(gate) * up
    return product if add_to is None else add_to.double() + product


def rotate_store_reference(qkv: Tensor, layer_cache: Tensor, rotation: Rotation) -> Tensor:
    slots, query_norm, key_norm = rotation.slots, rotation.query_norm, rotation.key_norm
    _, kv_heads, _, block_size, head_dim = layer_cache.shape
    wide = qkv.double()
    queries, keys, values = wide.split((wide.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if query_norm is not None and key_norm is not None:
        queries = torch.rms_norm(queries, [head_dim], query_norm.double(), rotation.eps)
        keys = torch.rms_norm(keys, [head_dim], key_norm.double(), rotation.eps)
    positions = rotation.positions.long()
    cos, sin = rotation.table[positions].double()[:, None].chunk(2, dim=-1)
    cos, signed_sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    used = slots >= 0
    blocks, offsets = (slots[used] // block_size).long(), (slots[used] % block_size).long()
    layer_cache[blocks, :, 0, offsets] = rotate(keys, cos, signed_sin)[used].to(layer_cache.dtype)
    layer_cache[blocks, :, 1, offsets] = values[used].to(layer_cache.dtype)
    queries = rotate(queries, cos, signed_sin)
    if rotation.query_scales is not None:
        queries = queries * rotation.query_scales[positions].double()[:, None, None]
    return queries.to(qkv.dtype)


def _weights(products: Tensor, rules: Scores) -> Tensor:
    """[kv_heads, group, queries, keys], of the last tokens of a sequence: weights of products of queries and keys."""
    queries, keys = products.shape[-2:]
    capped = (products / rules.softcap).tanh() * rules.softcap if rules.softcap else products
    behind = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    visible = (behind >= 0) & (behind < (rules.window or keys))
    scores = capped.masked_fill(~visible.to(products.device), float("-inf"))
    if rules.sinks is not None:
        sinks = rules.sinks.double().view(*products.shape[:2], 1, 1).expand(*products.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    return scores.softmax(-1)[..., :keys]


def prefill_attention_reference(
    queries: Tensor,
    layer_cache: Tensor,
    contexts: list[int],
    lengths: list[int],
    tables: list[list[int]],
    rules: Scores = PLAIN,
) -> Tensor:
    """Densely, chunk by chunk, in float64."""
    _, kv_heads, _, block_size, head_dim = layer_cache.shape
    results = []
    for query, context, table in zip(queries.double().split(lengths), contexts, tables, strict=True):
        end = context + len(query)
        blocks = layer_cache.double()[torch.tensor(table[: -(-end // block_size)], device=queries.device)]
        keys, values = blocks.permute(2, 1, 0, 3, 4).reshape(2, kv_heads, -1, head_dim)[:, :, :end]
        grouped = query.view(len(query), kv_heads, -1, head_dim)
        weights = _weights(torch.einsum("qkgd,ktd->kgqt", grouped, keys) / head_dim**0.5, rules)
        results.append(torch.einsum("kgqt,ktd->qkgd", weights, values).reshape(query.shape))
    return torch.cat(results)


def decode_attention_reference(
    queries: Tensor, layer_cache: Tensor, lengths: list[int], tables: list[list[int]], rules: Scores = PLAIN
) -> Tensor:
    contexts = [length - 1 for length in lengths]
    return prefill_attention_reference(queries, layer_cache, contexts, [1] * len(lengths), tables, rules)


def sample_reference(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    low, high = (seeds[:, i].long() & 0xFFFFFFFF for i in (0, 1))
    uniform = uniform_rows(low | high << 32, positions.long(), logits.shape[1])
    noise = -torch.log(-torch.log1p(-uniform))
    drawn = logits.float() / temperatures.clamp(min=1e-9)[:, None] + noise
    return torch.where(temperatures[:, None] > 0, drawn, logits.float()).argmax(-1).int()
