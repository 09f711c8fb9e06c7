"""Each row of SamplingParams reaches what applies it: a new one that the engine forgets fails here."""

from typing import Any

import pytest
import torch

from baton_proto.sampling import PARAMETERS, VLLM_ALONE, Needs, Parameter, SamplingParams
from engine.runners.sampler import Sampler
from engine.sequences.batch import SampledToken
from engine.sequences.sequence import PENDING, Sequence

EOS = (3,)
VOCAB = 40
OUTPUT = list(range(5, 25))
ROWS = pytest.mark.parametrize("row", PARAMETERS.values(), ids=list(PARAMETERS))
ROUTERS = ("bad_words", *VLLM_ALONE, "logprob_token_ids")
"""Engines know the words by their tokens, ours nothing of vLLM alone, and ids come with `logprobs`: test_sampler.py."""
MASKS = ("grammar", "bad_words", "allowed_token_ids")
GRAMMAR = ("grammar",)  # needs a matcher: tests/baton/test_grammars.py
ENGINES = ("max_tokens", "min_tokens", "stop_token_ids", "ignore_eos")  # decide about the end of a sequence
SCORES = ("prompt_logprobs",)  # tests/engine/runners/test_prompt_scores.py
KERNELS = ("seed", "temperature")  # engine/kernels/sampling.py: inputs of a step


def values_of(row: Parameter) -> list[Any]:
    """Allowed values other than the default."""
    rule = row.rule
    if row.name in (*GRAMMAR, *ROUTERS):
        return []
    numbers = {low for low in (rule.low,) if low is not None and not rule.open_below}
    numbers |= {n for n in (rule.high, 1, 5, 0.001) if n is not None and (rule.high is None or n <= rule.high)}
    match row.default:
        case bool():
            return [not row.default]
        case tuple():
            return [(5,)]
        case dict():
            return [{5: float(number)} for number in numbers]
    kind = float if isinstance(row.default, float) else int
    return [kind(n) for n in numbers if kind(n) == n and n not in (row.default, rule.off)]


def sequence(name: str | None = None, value: Any = None) -> Sequence:
    params: dict[str, Any] = {"max_tokens": 100, "seed": 11} | ({} if name is None else {name: value})
    return Sequence("r", [1, 2, *OUTPUT], 2, SamplingParams(**params))


def sampled(logits: torch.Tensor, of: Sequence) -> SampledToken:
    (token,) = Sampler(EOS).sample(logits, [of])
    return token


@ROWS
def test_only_what_the_kernel_or_the_engine_applies_is_plain(row: Parameter) -> None:
    for value in values_of(row):
        asks = sequence(row.name, value)
        is_short = row.name == "min_tokens" and value > len(OUTPUT)
        assert asks.is_plain == (row.rule.needs is Needs.KERNEL and not is_short), value
    assert (row.rule.needs is Needs.KERNEL) == (row.name in (*ENGINES, *SCORES, *KERNELS))
    assert (row.rule.needs is Needs.MASK) == (row.name in MASKS)


@ROWS
def test_the_sampler_reads_no_pending_token(row: Parameter) -> None:
    """A step's own token is pending while it is drawn."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)) * 0.5
    for value in values_of(row):
        asks = sequence(row.name, value)
        expected = sampled(logits, asks)
        asks.token_ids.append(PENDING)
        asks.num_pending_tokens = 1
        assert sampled(logits, asks) == expected, value


@pytest.mark.parametrize("name", [name for name in PARAMETERS if name not in (*ENGINES, *SCORES, *GRAMMAR, *ROUTERS)])
def test_the_sampler_applies_it(name: str) -> None:
    """Some allowed value changes some token, or what is told with it."""
    row = PARAMETERS[name]
    random = torch.Generator().manual_seed(0)
    steps = [torch.randn(1, VOCAB, generator=random) * 0.5 for _ in range(20)]
    plain = [sampled(logits, sequence()) for logits in steps]
    assert any([sampled(logits, sequence(row.name, value)) for logits in steps] != plain for value in values_of(row))
