"""Log-probabilities of a prompt's tokens, as vLLM's core or its server tells them."""

from collections.abc import Mapping, Sequence as List
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import ArrayLike

from baton_proto.sampling import PromptLogprobs
from runtime.errors import ProtocolError


class Score(Struct):
    """One entry of a row in a server's answer."""

    logprob: float
    rank: int


Rows = List[dict[int, Score] | None]
"""Of a server, one for each token of the prompt, by token ids."""


def scores_of(num_prompt_tokens: int, wanted: int, tensors: Any) -> PromptLogprobs | None:
    """`tensors`: of the core, whose rows have the prompt's token first, then the best ones, of which as many are told
    as are `wanted`; None: there are none, as of a prompt of one token."""
    rows = num_prompt_tokens - 1
    if tensors is None:
        return None if rows else _packed(wanted, [], [], [], [])
    ids, values = (tensor[:rows].numpy() for tensor in tensors[:2])
    top = slice(1, 1 + wanted)
    return _packed(wanted, values[:, 0], tensors[2][:rows].numpy(), ids[:, top], values[:, top])


def scores_of_answer(prompt: List[int], rows: Rows, wanted: int) -> PromptLogprobs:
    """Of each token's row as many of the best as are `wanted`. Raises ProtocolError."""
    try:
        each = zip(prompt[1:], [row or {} for row in rows[1:]], strict=True)
        told = [(row[token], _best(row, wanted)) for token, row in each]
    except (KeyError, ValueError) as error:
        raise ProtocolError("vLLM", f"log-probabilities of a prompt that cannot be read: {error}") from error
    best = [one for _, top in told for one in top]
    logprobs, ranks = [one.logprob for one, _ in told], [one.rank for one, _ in told]
    return _packed(wanted, logprobs, ranks, [token for token, _ in best], [one.logprob for _, one in best])


def _best(row: Mapping[int, Score], wanted: int) -> List[tuple[int, Score]]:
    """Invariant: a prompt's token that is none of the best has a higher rank than these."""
    return sorted(row.items(), key=lambda one: one[1].rank)[:wanted]


def _packed(num_top: int, logprobs: ArrayLike, ranks: ArrayLike, ids: ArrayLike, values: ArrayLike) -> PromptLogprobs:
    numbers, floats = np.dtype("<u4"), np.dtype("<f4")
    columns = ((logprobs, floats), (ranks, numbers), (ids, numbers), (values, floats))
    return PromptLogprobs(num_top, *(np.asarray(column, dtype=kind).tobytes() for column, kind in columns))
