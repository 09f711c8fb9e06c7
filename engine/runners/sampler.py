"""From logits to tokens, one row per sequence: penalties, truncation, seeded noise.

The order of operations is vLLM's: masks (grammar, allowed tokens, bad words, min_tokens), logit_bias, penalties; then
argmax (greedy), or temperature, min_p, top_k, top_p and a draw. All of it is batched tensor code on the logits' device.
An operation runs for the rows that ask for it alone, so a batch of plain greedy rows is one argmax.
"""

import functools
from collections.abc import Callable, Iterable, Sequence as Run

import numpy as np
import torch
from torch import Tensor

from baton_proto.sampling import Needs, SamplingParams, TokenLogprobs
from engine.kernels.philox import WORDS_PER_COUNTER, uniform_at, uniform_rows
from engine.sequences.batch import SampledToken
from engine.sequences.sequence import Sequence
from runtime.grammar.matcher import Asked, Words, fill_masks

_REACH = 26.0  # a token further below the best never wins, because Gumbel noise lies between -2.9 and 22.9


class Sampler:
    def __init__(self, eos_token_ids: Iterable[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)

    def sample(self, logits: Tensor, sequences: Run[Sequence]) -> list[SampledToken]:
        """`logits` [n, vocab] of any float type: row i is for the first unknown token of sequences[i]. They are not
        changed."""
        params = [sequence.sampling for sequence in sequences]
        drawn = _rows(params, lambda p: not p.is_greedy)
        adjusted = any(map(_adjusts, params)) or any(map(is_short, sequences))
        adjusted = adjusted or any(map(_has_mask, sequences))
        scores = logits
        if adjusted:
            scores = logits.to(torch.float32, copy=True)
            _forbid_masked(scores, sequences)
            self._forbid_stops(scores, sequences)
            _add_bias(scores, params)
            _penalize(scores, sequences)
        tokens = scores.argmax(dim=-1)
        if drawn:
            rows = torch.tensor(drawn, device=logits.device)
            tokens[rows] = _draw(scores[rows].float(), [sequences[row] for row in drawn])
        token_ids = tokens.tolist()
        logprobs = _logprobs(logits, token_ids, params)
        return [SampledToken(token_id, logprobs.get(row)) for row, token_id in enumerate(token_ids)]

    def _forbid_stops(self, scores: Tensor, sequences: Run[Sequence]) -> None:
        """Forbids the tokens that would end a sequence before `min_tokens` tokens are out."""
        rows: list[int] = []
        columns: list[int] = []
        for row, sequence in enumerate(sequences):
            if is_short(sequence) and sequence.matcher is None:
                stops = sequence.sampling.stop_token_ids
                if not sequence.sampling.ignore_eos:
                    stops += self._eos_token_ids
                if set(stops).issuperset(sequence.sampling.allowed_token_ids or [-1]):
                    continue  # nothing would be left
                rows.extend([row] * len(stops))
                columns.extend(stops)
        if rows:
            scores[_index(rows, scores), _index(columns, scores)] = float("-inf")


def is_masked(sequence: Sequence) -> bool:
    """Whether the next token depends on a mask too, and on nothing else."""
    return sequence.needs is Needs.MASK and (sequence.matcher is not None or not is_short(sequence))


def is_short(sequence: Sequence) -> bool:
    return sequence.next_position < sequence.sampling.min_tokens


def fill_rows(sequences: Iterable[Sequence], words: Words) -> None:
    """Fills words [n, num_words] with the tokens that grammar and caller allow each of n sequences. min_tokens and
    ignore_eos give way where a grammar allows nothing but the end, and a caller's mask where nothing would be left."""
    sequences = list(sequences)
    asked, rows = [], []
    for row, sequence in enumerate(sequences):
        if sequence.matcher is not None:
            ends = not (sequence.sampling.ignore_eos or is_short(sequence))
            asked.append(Asked(sequence.matcher, sequence.output_from(sequence.matcher.num_read), ends))
            rows.append(row)
    if len(rows) == len(words):
        fill_masks(asked, words)
    else:
        words[:] = -1  # all
        if rows:
            masks = np.empty((len(rows), words.shape[1]), dtype=np.int32)
            fill_masks(asked, masks)
            words[rows] = masks
    for row, sequence in zip(words, sequences, strict=True):
        _narrow(row, sequence)


def _narrow(row: Words, sequence: Sequence) -> None:
    """Leaves the allowed tokens [num_words], without those that would complete a bad word."""
    if allowed := sequence.sampling.allowed_token_ids:
        _keep(row, row & _bits(allowed, len(row)))
    if words := sequence.sampling.bad_word_ids:
        output = sequence.output_token_ids
        last = [word[-1] for word in words if len(word) == 1 or output[1 - len(word) :] == list(word[:-1])]
        _keep(row, row & ~_bits(tuple(last), len(row)))


def _keep(row: Words, kept: Words) -> None:
    if kept.any():
        row[:] = kept


@functools.lru_cache(maxsize=64)
def _bits(token_ids: tuple[int, ...], num_words: int) -> Words:
    bits = np.zeros(num_words, dtype=np.uint32)
    ids = np.array(token_ids, dtype=np.int64)
    np.bitwise_or.at(bits, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return bits.view(np.int32)


def _has_mask(sequence: Sequence) -> bool:
    p = sequence.sampling
    return sequence.matcher is not None or bool(p.allowed_token_ids) or bool(p.bad_word_ids)


def _rows(params: Run[SamplingParams], asks: Callable[[SamplingParams], bool]) -> list[int]:
    return [row for row, p in enumerate(params) if asks(p)]


def _index(values: list[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)


def _column(values: list[float], like: Tensor) -> Tensor:
    """float32 [n, 1]"""
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]


def _has_penalty(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0


def _adjusts(p: SamplingParams) -> bool:
    return bool(p.logit_bias) or _has_penalty(p)


def _truncates(p: SamplingParams) -> bool:
    return p.top_k > 0 or p.top_p < 1 or p.min_p > 0


def _forbid_masked(scores: Tensor, sequences: Run[Sequence]) -> None:
    """Forbids what the masks of sequences do not allow. Invariant: every row keeps a token."""
    rows = [row for row, sequence in enumerate(sequences) if _has_mask(sequence)]
    if not rows:
        return
    words = np.empty((len(rows), -(-scores.shape[1] // 32)), dtype=np.int32)
    fill_rows([sequences[row] for row in rows], words)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little", count=scores.shape[1])
    allowed = torch.from_numpy(bits).to(scores.device, torch.bool)
    at = _index(rows, scores)
    scores[at] = scores[at].masked_fill(~allowed, float("-inf"))


def _add_bias(scores: Tensor, params: Run[SamplingParams]) -> None:
    rows = [row for row, p in enumerate(params) for _ in p.logit_bias]
    if rows:
        columns = [token_id for p in params for token_id in p.logit_bias]
        bias = [value for p in params for value in p.logit_bias.values()]
        at = (_index(rows, scores), _index(columns, scores))
        scores.index_put_(at, torch.tensor(bias, device=scores.device), accumulate=True)


def _penalize(scores: Tensor, sequences: Run[Sequence]) -> None:
    """The repetition penalty counts prompt and output, the other two count the output."""
    rows = [row for row, sequence in enumerate(sequences) if _has_penalty(sequence.sampling)]
    if not rows:
        return
    penalized = [sequences[row] for row in rows]
    params = [sequence.sampling for sequence in penalized]
    at = _index(rows, scores)
    values = scores[at]
    seen = _counts([sequence.known_token_ids for sequence in penalized], values) > 0
    counts = _counts([sequence.output_token_ids for sequence in penalized], values)
    repetition = _column([p.repetition_penalty for p in params], scores)
    values = torch.where(seen, torch.where(values > 0, values / repetition, values * repetition), values)
    values -= _column([p.frequency_penalty for p in params], scores) * counts
    values -= _column([p.presence_penalty for p in params], scores) * (counts > 0)
    scores[at] = values


def _counts(token_ids: list[list[int]], like: Tensor) -> Tensor:
    """How often each token occurs: float32 [n, vocab]"""
    counts = torch.zeros_like(like)
    for row, ids in enumerate(token_ids):
        if ids:
            counts[row] = torch.bincount(_index(ids, like), minlength=like.shape[1])
    return counts


def _draw(scores: Tensor, sequences: Run[Sequence]) -> Tensor:
    """One token per row of float32 [n, vocab], which is changed: argmax of logit / temperature + Gumbel noise, which
    is a draw from the softmax. Invariant: a token's noise depends on the seed, the output position and the token
    alone."""
    params = [sequence.sampling for sequence in sequences]
    scores /= _column([p.temperature for p in params], scores)
    truncated = _rows(params, _truncates)
    if truncated:
        at = _index(truncated, scores)
        scores[at] = _truncate(scores[at], [params[row] for row in truncated])
    seeds = _index([p.seed for p in params], scores)
    positions = _index([sequence.next_position for sequence in sequences], scores)
    # Because noise is expensive, it is made only for tokens that can win where they are few.
    rows, token_ids = torch.nonzero(scores >= scores.amax(dim=-1, keepdim=True) - _REACH, as_tuple=True)
    if len(rows) * WORDS_PER_COUNTER < scores.numel():
        scores[rows, token_ids] += _gumbel(uniform_at(seeds[rows], positions[rows], token_ids))
    else:
        scores += _gumbel(uniform_rows(seeds, positions, scores.shape[1]))
    return scores.argmax(dim=-1)


def _gumbel(uniform: Tensor) -> Tensor:
    return -torch.log(-torch.log1p(-uniform))


def _truncate(scores: Tensor, params: Run[SamplingParams]) -> Tensor:
    """A new tensor in which scores (after temperature) outside min_p, top_k and top_p are -inf.

    Because tokens that tie with the last kept one are kept too, the result does not depend on how a device sorts.
    """
    min_p = _column([p.min_p for p in params], scores)
    floor = scores.amax(dim=-1, keepdim=True) + min_p.log()  # p >= min_p * max(p)
    scores = scores.masked_fill(scores < floor, float("-inf"))
    for width in {_width(p, scores.shape[1]) for p in params}:
        rows = [row for row, p in enumerate(params) if _width(p, scores.shape[1]) == width]
        at = _index(rows, scores)
        chosen = scores[at]
        threshold = _threshold(chosen, [params[row] for row in rows], width)
        scores[at] = chosen.masked_fill(chosen < threshold, float("-inf"))
    return scores


def _width(p: SamplingParams, vocab_size: int) -> int:
    """How many of a row's best tokens top_k and top_p look at, independent of other rows; 0: none."""
    if p.top_k > 0:
        return min(p.top_k, vocab_size)
    return vocab_size if p.top_p < 1 else 0


def _threshold(scores: Tensor, params: Run[SamplingParams], width: int) -> Tensor:
    """The lowest kept score [n, 1]: among the best `width` tokens, and before their mass reaches top_p."""
    if width == 0:
        return scores.new_full((len(scores), 1), float("-inf"))
    best = scores.topk(width, dim=-1).values  # descending
    probabilities = best.softmax(dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    num_kept = (mass_before < _column([p.top_p for p in params], scores)).sum(dim=-1, keepdim=True)
    return best.gather(1, num_kept.clamp(min=1) - 1)


def _logprobs(logits: Tensor, token_ids: list[int], params: Run[SamplingParams]) -> dict[int, TokenLogprobs]:
    """Row -> logprobs of the raw distribution, for the rows that ask."""
    rows = _rows(params, lambda p: p.logprobs is not None)
    if not rows:
        return {}
    raw = logits[_index(rows, logits)].float().log_softmax(dim=-1)
    chosen = raw.gather(1, _index([token_ids[row] for row in rows], logits)[:, None])[:, 0].tolist()
    best = raw.topk(max(0 if params[row].logprob_token_ids else params[row].logprobs or 0 for row in rows), dim=-1)
    answers = {}
    for i, (row, values, indices) in enumerate(zip(rows, best.values.tolist(), best.indices.tolist(), strict=True)):
        count = params[row].logprobs or 0
        if asked := params[row].logprob_token_ids:
            indices = list(dict.fromkeys((token_ids[row], *asked)))
            values, count = raw[i, _index(indices, raw)].tolist(), len(indices)
        answers[row] = TokenLogprobs(chosen[i], list(zip(indices[:count], values[:count], strict=True)))
    return answers
