"""Log-probabilities of a prompt's tokens: what the rows of a step say of the tokens after them.

Because a row of logits has the size of the vocabulary, the rows of a chunk are scored part by part. All ranks take part
in each part, and rank 0 scores.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.sequences.batch import Batch
from engine.sequences.sequence import TokenScores

ROWS_AT_ONCE = 128  # 0.2 GB of float32, twice, for a vocabulary of 152k tokens

StepRows = tuple[int, int]
"""First and end of rows of a step."""
LogitsOf = Callable[[Tensor], Tensor]
"""Hidden states [rows, hidden] -> logits [rows, vocab] of all ranks."""


@dataclass(frozen=True, slots=True)
class ScoresOnTheWay:
    """Scores of one chunk in host memory, once the device has copied them."""

    logprobs: Tensor  # float32 [rows]
    ranks: Tensor  # int64 [rows]
    top_ids: Tensor  # int64 [rows, num_top]
    top_logprobs: Tensor  # float32 [rows, num_top]

    def landed(self) -> TokenScores:
        ranks, top_ids = (tensor.numpy().astype(np.uint32) for tensor in (self.ranks, self.top_ids))
        return TokenScores(self.logprobs.numpy(), ranks, top_ids, self.top_logprobs.numpy())


def scored_rows(batch: Batch) -> list[StepRows]:
    """The rows of each item of `batch.scored`, in order."""
    if not batch.scored:
        return []
    rows, begin = {}, 0
    for item in batch.prefill:
        rows[item.sequence] = begin - item.start
        begin += item.num_tokens
    return [(rows[item.sequence] + at.start, rows[item.sequence] + at.stop) for item, at in batch.scored]


def score(hidden: Tensor, batch: Batch, logits_of: LogitsOf) -> list[ScoresOnTheWay]:
    """Scores each item of `batch.scored`. hidden: of the whole step. The results are valid when all work of the current
    stream is done."""
    found = []
    for (first, end), (item, at) in zip(scored_rows(batch), batch.scored, strict=True):
        sequence = item.sequence
        targets = torch.tensor(sequence.token_ids[at.start + 1 : at.stop + 1]).to(hidden.device, non_blocking=True)
        num_top = sequence.sampling.prompt_logprobs or 0
        logits = logits_in_parts(hidden, [(first, end)], logits_of)
        parts = [_scored(rows, tokens, num_top) for rows, tokens in zip(logits, _parts(targets), strict=True)]
        columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        found.append(ScoresOnTheWay(**{name: _to_host(column) for name, column in columns.items()}))
    return found


def logits_in_parts(hidden: Tensor, rows: list[StepRows], logits_of: LogitsOf) -> Iterator[Tensor]:
    """What every rank computes, in this order."""
    for first, end in rows:
        yield from map(logits_of, _parts(hidden[first:end]))


def _parts(rows: Tensor) -> tuple[Tensor, ...]:
    return torch.split(rows, ROWS_AT_ONCE)


def _scored(logits: Tensor, targets: Tensor, num_top: int) -> dict[str, Tensor]:
    """The columns of ScoresOnTheWay."""
    raw = logits.float().log_softmax(dim=-1)
    chosen = raw.gather(1, targets[:, None])
    best = raw.topk(num_top, dim=-1)
    ranks = (raw > chosen).sum(dim=-1) + 1
    return {"logprobs": chosen[:, 0], "ranks": ranks, "top_ids": best.indices, "top_logprobs": best.values}


def _to_host(values: Tensor) -> Tensor:
    """Copies without waiting for the device."""
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
