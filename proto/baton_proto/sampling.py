"""How a token is chosen: the sampling parameters that router, workers and engine share.

Each field of SamplingParams is the one row of its parameter: name, type, default and rule. Both APIs, the router's
checks and the engine's choice of a sampler derive from it.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, Literal, get_args, get_type_hints

from msgspec import Meta, Struct

from baton_proto.decoding import Int32, Packed, Rows, Small, Text
from baton_proto.grammar import Grammar

GREEDY_BELOW = 1e-5  # a lower temperature takes the best token: dividing by it would overflow float32 logits
MAX_SEED = 2**63 - 1
MAX_BAD_WORDS = 128
MAX_ALLOWED = 16384  # token ids
MAX_XARGS = 64
MAX_LOGPROB_IDS = 128
MAX_PROMPT_LOGPROBS = 100_000  # values of a prompt, alternatives included: 8 bytes each, and a COMMIT takes 1 MiB
MAX_PATTERN = 1024  # tokens of a pattern, and how often it comes: vLLM looks at all of them at each token
VLLM_ALONE = ("vllm_xargs", "repetition_detection")
"""Parameters that our own engine has no use for."""

Repetition = dict[Literal["min_pattern_size", "max_pattern_size", "min_count"], Small]
Word = Annotated[tuple[Small, ...], Rows]
_Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_XArg = Text | _Int64 | float | Annotated[list[Text | _Int64 | float], Meta(max_length=MAX_XARGS)]
XArgs = Annotated[dict[Text, _XArg], Meta(max_length=MAX_XARGS)]


class Needs(IntEnum):
    """What it takes to apply a parameter whose value is not the default, the cheapest first."""

    KERNEL = 0  # the device's sampling kernel applies every value, or the engine does apart from sampling
    MASK = 1  # the kernel applies a mask of tokens, made once the token before is known
    LOGITS = 2  # engine/runners/sampler.py applies it to the logits, and the step waits for the device


@dataclass(frozen=True, slots=True)
class Rule:
    """Which values a request may give, and what applying them needs. Needs.LOGITS is right for every parameter, so a
    new one starts with it."""

    low: float | None = None  # bounds a number, or each value of a mapping; token ids are bounded by the vocabulary
    high: float | None = None
    needs: Needs = Needs.LOGITS
    open_below: bool = False  # `low` itself is refused
    off: int | None = None  # a second spelling of the default
    most: int | None = None  # entries of a list or mapping
    least: int = 0  # entries of one that is given


class SamplingParams(Struct, frozen=True, omit_defaults=True):
    """Validated by the router; every later hop trusts it.

    Because the noise of output position i depends on (seed, i) alone, a replay on another worker continues the same
    random stream. The router draws a seed when the caller gave none.
    """

    max_tokens: Annotated[Small, Rule(1, None, Needs.KERNEL)]  # prompt and output together fit the model
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED), Rule(-MAX_SEED - 1, MAX_SEED, Needs.KERNEL)] = (
        0  # the caller's modulo 2**63
    )
    temperature: Annotated[float, Rule(0.0, 2.0, Needs.KERNEL)] = 1.0  # 0 is greedy
    top_p: Annotated[float, Rule(0.0, 1.0, Needs.LOGITS, open_below=True)] = 1.0
    top_k: Annotated[Int32, Rule(-1, 2**31 - 1, Needs.LOGITS, off=-1)] = 0  # 0 is off, as is vLLM's -1
    min_p: Annotated[float, Rule(0.0, 1.0, Needs.LOGITS)] = 0.0
    presence_penalty: Annotated[float, Rule(-2.0, 2.0, Needs.LOGITS)] = 0.0
    frequency_penalty: Annotated[float, Rule(-2.0, 2.0, Needs.LOGITS)] = 0.0
    repetition_penalty: Annotated[float, Rule(0.0, 2.0, Needs.LOGITS, open_below=True)] = 1.0
    min_tokens: Annotated[Small, Rule(0, None, Needs.KERNEL)] = (
        0  # before, EOS and stop tokens are masked: see is_plain
    )
    stop_token_ids: Annotated[tuple[Small, ...], Meta(max_length=1024), Rule(needs=Needs.KERNEL, most=1024)] = ()
    ignore_eos: Annotated[bool, Rule(needs=Needs.KERNEL)] = False
    logprobs: Annotated[Small | None, Rule(0, 20, Needs.LOGITS)] = None  # alternatives per token, 0: the sampled one's
    logit_bias: Annotated[dict[Small, float], Meta(max_length=1024), Rule(-100.0, 100.0, Needs.LOGITS, most=1024)] = {}
    grammar: Annotated[Grammar | None, Rule(needs=Needs.MASK)] = None  # what the answer must look like
    prompt_logprobs: Annotated[Small | None, Rule(0, 20, Needs.KERNEL)] = None  # as logprobs, of the prompt's tokens
    bad_words: Annotated[
        tuple[Text, ...], Meta(max_length=MAX_BAD_WORDS), Rule(needs=Needs.MASK, most=MAX_BAD_WORDS)
    ] = ()
    allowed_token_ids: Annotated[
        tuple[Small, ...], Meta(max_length=MAX_ALLOWED), Rule(needs=Needs.MASK, most=MAX_ALLOWED, least=1)
    ] = ()
    vllm_xargs: Annotated[XArgs, Rule(most=MAX_XARGS)] = {}  # vLLM's alone
    # The alternatives of each token, behind the sampled one; `logprobs` is their number, whatever the caller gave.
    logprob_token_ids: Annotated[
        tuple[Small, ...], Meta(max_length=MAX_LOGPROB_IDS), Rule(needs=Needs.LOGITS, most=MAX_LOGPROB_IDS)
    ] = ()
    # vLLM's alone: an answer ends that has `min_count` times the same tokens in a row, `min_pattern_size` to
    # `max_pattern_size` of them.
    repetition_detection: Annotated[Repetition, Meta(max_length=3), Rule()] = {}
    # No parameters of a request:
    is_seeded: bool = False  # the seed is the caller's
    bad_word_ids: Annotated[tuple[Word, ...], Meta(max_length=2 * MAX_BAD_WORDS)] = ()  # see bad_words.py

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def needs(self) -> Needs:
        """The most that any of the parameters needs."""
        asked = [row.rule.needs for row in _BEYOND_KERNEL if getattr(self, row.name) != row.default]
        return max(asked) if asked else Needs.KERNEL


@dataclass(frozen=True, slots=True)
class Parameter:
    """A field of SamplingParams."""

    name: str
    type: Any
    rule: Rule
    default: Any  # of max_tokens, which has none: any number


def _parameter(name: str, kind: Any) -> Parameter:
    rule = get_args(_ANNOTATED[name])[-1]
    return Parameter(name, kind, rule, getattr(SamplingParams(max_tokens=1), name))


_ANNOTATED = get_type_hints(SamplingParams, include_extras=True)


_OF_ROUTER = ("is_seeded", "bad_word_ids")
PARAMETERS = {
    name: _parameter(name, kind) for name, kind in get_type_hints(SamplingParams).items() if name not in _OF_ROUTER
}
"""By name."""
_BEYOND_KERNEL = [row for row in PARAMETERS.values() if row.rule.needs > Needs.KERNEL]


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Log-probabilities of the raw distribution (before temperature, penalties and bias), as OpenAI gives them."""

    logprob: float
    top: Annotated[list[tuple[Small, float]], Rows]  # (token id, logprob), best first, or see logprob_token_ids


class PromptLogprobs(Struct, frozen=True, array_like=True):
    """Log-probabilities of a prompt's tokens, as TokenLogprobs has them of an output's. Nothing comes before the first
    token, which has none: row i is for token i + 1."""

    num_top: Small  # alternatives per token
    logprobs: Packed  # f32 LE [rows]
    ranks: Packed  # u32 LE [rows]: 1 + the number of tokens that were more probable
    top_ids: Packed  # u32 LE [rows, num_top], best first
    top_logprobs: Packed  # f32 LE [rows, num_top]

    @property
    def num_rows(self) -> int:
        return len(self.logprobs) // 4

    def fits(self, num_prompt_tokens: int) -> bool:
        """Whether every part has the size that it should have."""
        rows = 4 * (num_prompt_tokens - 1)
        return len(self.logprobs) == len(self.ranks) == rows and (
            len(self.top_ids) == len(self.top_logprobs) == rows * self.num_top
        )
