"""How to sample: as a caller wrote it, and the check that makes it the engine's SamplingParams. Used by validation."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from baton_proto.sampling import SamplingParams
from runtime.errors import InvalidRequestError

N = TypeVar("N", int, float)
T = TypeVar("T")

MAX_CHOICES = 16
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024  # of each: all that might begin one is compared with it after every token
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_TOP_K = 2**31 - 1
MAX_SEED = 2**63 - 1

_dice = random.Random()


class Options(Struct, frozen=True, kw_only=True):
    """How to sample, as the caller wrote it; None is absent. The names are those of both APIs."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = {}
    n: int | None = None
    max_tokens_field: str = "max_tokens"  # as the caller calls it
    logprobs_field: str = "logprobs"


def check_sampling(options: Options, vocab_size: int) -> SamplingParams:
    """All but the number of tokens, which depends on the prompt."""
    check_range("n", options.n, 1, MAX_CHOICES)
    check_range("min_tokens", options.min_tokens, 0, None)
    if len(options.stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError("stop", f"has {len(options.stop)} strings; at most {MAX_STOP_STRINGS} are allowed")
    if not all(options.stop):
        raise InvalidRequestError("stop", "has an empty string; a stop string needs at least one character")
    if (longest := max(map(len, options.stop), default=0)) > MAX_STOP_CHARS:
        problem = f"has a string of {longest} characters; at most {MAX_STOP_CHARS} are allowed"
        raise InvalidRequestError("stop", problem)
    check_in_vocabulary("stop_token_ids", options.stop_token_ids, vocab_size)
    check_in_vocabulary("logit_bias", options.logit_bias, vocab_size)
    for token_id, bias in options.logit_bias.items():
        check_range(f"logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    seed = check_range("seed", options.seed, 0, MAX_SEED)
    return SamplingParams(
        max_tokens=1,
        seed=_dice.getrandbits(63) if seed is None else seed,
        temperature=_default(check_range("temperature", options.temperature, 0.0, 2.0), 1.0),
        top_p=_default(check_range("top_p", options.top_p, 0.0, 1.0, open_below=True), 1.0),
        top_k=max(0, _default(check_range("top_k", options.top_k, -1, MAX_TOP_K), 0)),  # -1 is how vLLM says off
        min_p=_default(check_range("min_p", options.min_p, 0.0, 1.0), 0.0),
        presence_penalty=_default(check_range("presence_penalty", options.presence_penalty, -2.0, 2.0), 0.0),
        frequency_penalty=_default(check_range("frequency_penalty", options.frequency_penalty, -2.0, 2.0), 0.0),
        repetition_penalty=_default(
            check_range("repetition_penalty", options.repetition_penalty, 0.0, 2.0, open_below=True), 1.0
        ),
        min_tokens=_default(options.min_tokens, 0),
        stop_token_ids=tuple(dict.fromkeys(options.stop_token_ids)),
        ignore_eos=bool(options.ignore_eos),
        logprobs=check_range(options.logprobs_field, options.logprobs, 0, MAX_LOGPROBS),
        logit_bias=dict(options.logit_bias),
    )


def check_range(name: str, value: N | None, low: float, high: float | None, open_below: bool = False) -> N | None:
    """Returns the value. NaN is outside of every range, since it compares false with everything."""
    if value is None:
        return None
    above = value > low if open_below else value >= low
    if above and (high is None or value <= high):
        return value
    lower = f"above {low}" if open_below else f"at least {low}"
    raise InvalidRequestError(name, f"is {value}, must be {lower}" + ("" if high is None else f" and at most {high}"))


def check_in_vocabulary(name: str, token_ids: Sequence[int] | Mapping[int, Any], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(name, f"token id {token_id} is not in the vocabulary, 0 to {vocab_size - 1}")


def _default(value: T | None, default: T) -> T:
    return default if value is None else value
