"""Log-probabilities of a prompt's tokens, row by row: how many a call may ask for, and how they are read.

Because a prompt may have a hundred thousand values, they are read in parts, so that the caller can let others go on in
between.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from baton_proto.sampling import MAX_PROMPT_LOGPROBS, PromptLogprobs, SamplingParams
from router.requests.request import GenerateRequest
from runtime.errors import InvalidRequestError

MAX_VALUES_OF_CALL: Final = 262_144  # of all prompts and choices together: 15 to 45 MB of JSON
VALUES_AT_ONCE: Final = 1024  # 3 ms; a row takes as long as ROW_COST values
ROW_COST: Final = 4
TOKENS_AT_ONCE: Final = 1024  # likewise, where their texts alone are wanted


class Row(Struct, frozen=True):
    """A token of a prompt, and what the model thought of it."""

    token_id: int
    logprob: float | None = None  # None: unknown, or the first token
    rank: int = 0  # 1: it was the most probable
    top: list[tuple[int, float]] = []  # (token id, logprob), best first


def rows_in_parts(prompt: NDArray[np.uint32], found: PromptLogprobs | None) -> Iterator[list[Row]]:
    """Parts of VALUES_AT_ONCE values at most, a row counting as ROW_COST and its alternatives."""
    if found is None:
        for first in range(0, len(prompt), TOKENS_AT_ONCE):
            yield list(map(Row, prompt[first : first + TOKENS_AT_ONCE].tolist()))
        return
    yield [Row(int(prompt[0]))]
    num_rows, num_top = found.num_rows, found.num_top
    logprobs, ranks = np.frombuffer(found.logprobs, "<f4"), np.frombuffer(found.ranks, "<u4")
    top_ids = np.frombuffer(found.top_ids, "<u4").reshape(num_rows, num_top)
    top_logprobs = np.frombuffer(found.top_logprobs, "<f4").reshape(num_rows, num_top)
    step = max(1, VALUES_AT_ONCE // (ROW_COST + num_top))
    for first in range(0, num_rows, step):
        at = slice(first, first + step)
        tops = zip(top_ids[at].tolist(), top_logprobs[at].tolist(), strict=True)
        top = [list(zip(*pair, strict=True)) for pair in tops]
        columns = prompt[first + 1 : first + 1 + step].tolist(), logprobs[at].tolist(), ranks[at].tolist(), top
        yield list(map(Row, *columns))


def num_values(num_prompt_tokens: int, sampling: SamplingParams) -> int:
    """The log-probabilities that one choice asks for."""
    return 0 if sampling.prompt_logprobs is None else num_prompt_tokens * (1 + sampling.prompt_logprobs)


def check_prompt(name: str, num_prompt_tokens: int, sampling: SamplingParams) -> None:
    """`name`: the caller's of the parameter. Raises InvalidRequestError."""
    if (values := num_values(num_prompt_tokens, sampling)) > MAX_PROMPT_LOGPROBS:
        problem = f"asks for {values} values: {num_prompt_tokens} prompt tokens with {sampling.prompt_logprobs} "
        problem += f"alternatives each; at most {MAX_PROMPT_LOGPROBS} are computed for a prompt"
        raise InvalidRequestError(name, problem)


def check_call(name: str, requests: Sequence[GenerateRequest]) -> None:
    """Raises InvalidRequestError."""
    if (values := sum(num_values(len(one.prompt), params) for one in requests for params in one.sampling)) == 0:
        return
    if values > MAX_VALUES_OF_CALL:
        problem = f"asks for {values} values of all prompts and choices; at most {MAX_VALUES_OF_CALL} are answered at "
        raise InvalidRequestError(name, f"{problem}once: send several requests")
