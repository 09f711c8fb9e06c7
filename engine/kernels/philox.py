"""Philox4x32-10, the counter-based generator behind seeded sampling: noise from (seed, position, token) alone.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Every sampler follows this layout,
which is that of Triton's `tl.philox(seed, c0, c1, c2, c3)`:

    key      = (seed & 0xffffffff, seed >> 32)
    counter  = (token id // 4, output position, 0, 0)
    word     = output[token id % 4]
    uniform  = (word + 0.5) * 2**-32, in float32, at most 1 - 2**-24

32-bit words live in int64 tensors, whose products wrap modulo 2**64.
"""

import torch
from torch import Tensor

WORDS_PER_COUNTER = 4

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_CHUNK = 1 << 14  # counters at once: the rounds' data stays in a CPU's cache
_BELOW_ONE = 1 - 2**-24

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Ten rounds over int64 tensors that hold 32-bit words; all broadcast with each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0 = c0 * _MULTIPLIERS[0]
        p1 = c2 * _MULTIPLIERS[1]
        c0 = ((p1 >> 32) ^ c1 ^ k0) & _MASK
        c2 = ((p0 >> 32) ^ c3 ^ k1) & _MASK
        c1 = p1 & _MASK
        c3 = p0 & _MASK
        k0 = (k0 + _KEY_STEPS[0]) & _MASK
        k1 = (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def uniform_rows(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Noise for every token id: seeds, positions int64 [n] -> float32 [n, vocab_size] in (0, 1)."""
    num_groups = -(-vocab_size // 4)
    groups = torch.arange(num_groups, device=seeds.device)
    rows_at_once = max(1, _CHUNK // num_groups)
    chunks = []
    for start in range(0, len(seeds), rows_at_once):
        rows = slice(start, start + rows_at_once)
        words = torch.stack(_generate(seeds[rows, None], positions[rows, None], groups), dim=-1)  # [rows, groups, 4]
        chunks.append(_to_uniform(words.flatten(1)[:, :vocab_size]))
    return torch.cat(chunks)


def uniform_at(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Noise for single tokens: three int64 [n] -> float32 [n], the same numbers as in `uniform_rows`."""
    chunks = []
    for start in range(0, len(token_ids), _CHUNK):
        part = slice(start, start + _CHUNK)
        words = torch.stack(_generate(seeds[part], positions[part], token_ids[part] >> 2), dim=-1)  # [n, 4]
        chunks.append(_to_uniform(words.gather(1, (token_ids[part] & 3)[:, None])[:, 0]))
    return torch.cat(chunks)


def _generate(seeds: Tensor, positions: Tensor, groups: Tensor) -> Words:
    zero = torch.zeros_like(seeds)
    return philox4x32((groups, positions, zero, zero), (seeds & _MASK, seeds >> 32))


def _to_uniform(words: Tensor) -> Tensor:
    """int64 words -> float32. Small values, which decide which token wins, keep their relative precision."""
    return ((words.float() + 0.5) * 2**-32).clamp_(max=_BELOW_ONE)
