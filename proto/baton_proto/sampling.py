"""How a token is chosen: the one struct that router, workers and engine share."""

from msgspec import Struct


class SamplingParams(Struct, frozen=True, omit_defaults=True):
    """Validated by the router; every later hop trusts it.

    `seed` is always set (drawn by the router when the caller gave none), so that a replay elsewhere continues the same
    random stream: the noise of output position i depends on (seed, i) alone.
    """

    max_tokens: int  # >= 1, prompt + max_tokens fits the model
    seed: int = 0  # 0..2**63-1
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0  # EOS and stop tokens are masked until so many are out
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives per token; 0 gives the sampled token's alone; None is off
    logit_bias: dict[int, float] = {}


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Log-probabilities of the raw distribution (before temperature, penalties and bias), as OpenAI gives them."""

    logprob: float
    top: list[tuple[int, float]]  # (token id, logprob), best first
