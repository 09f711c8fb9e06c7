"""A request's sampling parameters as vLLM has them."""

from typing import Any

from baton_proto.grammar import Grammar, GrammarKind
from baton_proto.sampling import MAX_SEED, PARAMETERS, SamplingParams

SAME_NAME = (
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "prompt_logprobs",
    "logit_bias",
)
"""Parameters with vLLM's name and meaning."""
TRANSLATED = (
    "max_tokens",
    "min_tokens",
    "seed",
    "temperature",
    "stop_token_ids",
    "ignore_eos",
    "grammar",
    "bad_words",
    "allowed_token_ids",
    "vllm_xargs",
    "logprobs",
    "logprob_token_ids",
    "repetition_detection",
)
"""Parameters whose value is another one for vLLM."""
OF_OUTPUT = ("presence_penalty", "frequency_penalty", "bad_words", "grammar", "repetition_detection")
"""Parameters that look at the output alone, while vLLM takes the output of a lost worker for a part of the prompt."""

GRAMMAR_FIELDS: dict[GrammarKind, str] = {
    "json_object": "json_object",
    "json_schema": "json",
    "regex": "regex",
    "choice": "choice",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}
SEED_STEP = 0x9E3779B97F4A7C15  # from one attempt's seed to the next: odd, so that no two are equal


def repeats(sampling: SamplingParams) -> bool:
    """Whether vLLM has to compute the answer of a lost worker from its beginning again."""
    return any(getattr(sampling, name) != PARAMETERS[name].default for name in OF_OUTPUT)


def vllm_sampling(sampling: SamplingParams, num_replayed: int, eos_token_ids: frozenset[int]) -> dict[str, Any]:
    """Arguments for vllm.SamplingParams, all but the grammar's.

    Sampled output depends on the seed and on where an attempt began: vLLM has one random stream for an attempt. Because
    a replay with the same seed would repeat the noise of the first tokens, it gets another one.
    """
    ends = set(sampling.stop_token_ids)
    ignores_eos = sampling.ignore_eos and sampling.grammar is None
    if not ignores_eos:
        ends |= eos_token_ids
    # Versions that do not know the ids are not told of them.
    ids = sampling.logprob_token_ids
    logprobs = {"logprobs": None, "logprob_token_ids": list(ids)} if ids else {"logprobs": sampling.logprobs}
    return {name: getattr(sampling, name) for name in SAME_NAME} | {
        "logit_bias": dict(sampling.logit_bias) or None,
        "bad_words": list(sampling.bad_words),
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
        "extra_args": dict(sampling.vllm_xargs) or None,
        "temperature": 0.0 if sampling.is_greedy else sampling.temperature,
        "seed": None if sampling.is_greedy else (sampling.seed + num_replayed * SEED_STEP) % (MAX_SEED + 1),
        "max_tokens": sampling.max_tokens - num_replayed,
        "min_tokens": max(0, sampling.min_tokens - num_replayed),
        "stop_token_ids": sorted(ends),
        "ignore_eos": ignores_eos,
        "repetition_detection": dict(sampling.repetition_detection) or None,
        "detokenize": False,
        **logprobs,
    }


def first_token_alone(arguments: dict[str, Any]) -> dict[str, Any]:
    """What differs in these arguments for an engine that computes the prompt and draws the first token alone."""
    return {"max_tokens": 1, "min_tokens": min(1, arguments["min_tokens"])}


def vllm_grammar(grammar: Grammar) -> dict[str, Any]:
    """Arguments for vllm's StructuredOutputsParams."""
    values: dict[GrammarKind, Any] = {"json_object": True, "choice": list(grammar.choices)}
    return {GRAMMAR_FIELDS[grammar.kind]: values.get(grammar.kind, grammar.text)}
