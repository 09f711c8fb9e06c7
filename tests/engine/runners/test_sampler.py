"""Sampling against a plain restatement of its rules, one row and one token at a time."""

import math
from dataclasses import dataclass
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from baton_proto.sampling import SamplingParams
from engine.kernels.philox import _to_uniform, uniform_at
from engine.runners.sampler import _REACH, Sampler, _gumbel, _penalize
from engine.sequences.sequence import Sequence

EOS = (3, 5)
VOCAB = 40


def sequence(prompt: list[int] | None = None, output: list[int] | None = None, **sampling: object) -> Sequence:
    prompt = prompt or [1]
    params = SamplingParams(max_tokens=100, **sampling)  # type: ignore[arg-type]
    return Sequence("r", prompt + (output or []), len(prompt), params)


def sample(logits: torch.Tensor, *sequences: Sequence) -> list[int]:
    return [token.token_id for token in Sampler(EOS).sample(logits, sequences)]


def adjusted(logits: np.ndarray, s: Sequence) -> np.ndarray:
    """Mask, bias, penalties: float64 [vocab]"""
    p, scores = s.sampling, logits.astype(np.float64).copy()
    if s.num_output_tokens < p.min_tokens:
        scores[list(p.stop_token_ids) + ([] if p.ignore_eos else list(EOS))] = -np.inf
    if p.allowed_token_ids:
        scores[[token for token in range(len(scores)) if token not in p.allowed_token_ids]] = -np.inf
    for *start, last in p.bad_word_ids:
        if not start or s.output_token_ids[-len(start) :] == start:
            scores[last] = -np.inf
    for token_id, bias in p.logit_bias.items():
        scores[token_id] += bias
    for token_id in set(s.token_ids):
        scores[token_id] *= 1 / p.repetition_penalty if scores[token_id] > 0 else p.repetition_penalty
    for token_id in set(s.output_token_ids):
        scores[token_id] -= p.frequency_penalty * s.output_token_ids.count(token_id) + p.presence_penalty
    return scores


def distribution(logits: np.ndarray, s: Sequence) -> np.ndarray:
    """What a draw has to follow: float64 [vocab]"""
    p, scores = s.sampling, adjusted(logits, s)
    scores = scores / p.temperature
    weights = np.exp(scores - scores.max())
    weights[weights < p.min_p * weights.max()] = 0
    order = np.argsort(-weights, kind="stable")
    if p.top_k:
        weights[order[p.top_k :]] = 0
    weights /= weights.sum()
    mass = 0.0
    for token_id in order:
        if mass >= p.top_p:
            weights[token_id] = 0
        mass += weights[token_id]
    return weights / weights.sum()


def draw(logits: np.ndarray, s: Sequence) -> tuple[int, float]:
    """The exponential race by hand: the winner, and its lead over the second in nats."""
    weights = distribution(logits, s)
    ids = torch.arange(len(logits))
    constant = torch.ones_like(ids)
    noise = uniform_at(constant * s.sampling.seed, constant * s.num_output_tokens, ids).double().numpy()
    with np.errstate(divide="ignore"):
        scores = np.log(weights) - np.log(-np.log1p(-noise))
    best, second = np.sort(scores)[::-1][:2]
    return int(scores.argmax()), best - second


def random_logits(rows: int, vocab: int = VOCAB, *, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def test_temperature_zero_takes_the_first_maximum() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [7, 20]] = 5
    logits[1, [39, 2]] = 1
    assert sample(logits, sequence(temperature=0.0), sequence(temperature=0.0)) == [7, 2]


def test_a_plain_greedy_batch_is_one_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_draw", "_penalize", "_add_bias"):
        monkeypatch.setattr(f"engine.runners.sampler.{name}", None)
    logits = random_logits(3)
    assert sample(logits, *[sequence(temperature=0.0)] * 3) == logits.argmax(-1).tolist()


def test_noise_is_made_only_for_rows_that_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds_used: set[int] = set()
    for name in ("uniform_at", "uniform_rows"):
        original = getattr(__import__("engine.runners.sampler", fromlist=[name]), name)

        def spy(seeds, *rest, original=original):  # type: ignore[no-untyped-def]
            seeds_used.update(seeds.tolist())
            return original(seeds, *rest)

        monkeypatch.setattr(f"engine.runners.sampler.{name}", spy)
    sample(random_logits(3), sequence(temperature=0.0, seed=1), sequence(seed=2), sequence(temperature=0.0, seed=3))
    assert seeds_used == {2}


def test_logits_are_not_changed() -> None:
    logits = random_logits(2)
    before = logits.clone()
    sample(logits, sequence(logit_bias={1: 5.0}, top_k=3), sequence(temperature=0.5))
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 9, "top_p": 0.8, "min_p": 0.02},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params: dict[str, float]) -> None:
    draws = 4000
    logits = random_logits(1, 12, scale=1.5)
    tokens = sample(logits.expand(draws, -1), *[sequence(seed=i, **params) for i in range(draws)])
    expected = distribution(logits[0].numpy(), sequence(**params)) * draws
    counts = np.bincount(tokens, minlength=12)
    assert (counts[expected == 0] == 0).all()
    likely = expected > 0
    chi_square = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    degrees = max(1, int(likely.sum()) - 1)
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees)


def test_successive_positions_of_one_seed_are_independent_draws() -> None:
    logits = torch.zeros(500, 2)
    tokens = sample(logits, *[sequence(output=[0] * i, seed=9) for i in range(500)])
    assert 200 < sum(tokens) < 300
    assert 200 < sum(a != b for a, b in pairwise(tokens)) < 300


@dataclass(frozen=True)
class Row:
    seed: int
    output: list[int]
    params: dict[str, object]


params = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_p": st.sampled_from([0.1, 0.5, 0.9, 1.0]),
        "top_k": st.sampled_from([0, 1, 3, 20, 1000]),
        "min_p": st.sampled_from([0.0, 0.05, 0.5]),
        "presence_penalty": st.sampled_from([-1.0, 0.7]),
        "frequency_penalty": st.sampled_from([-0.5, 0.9]),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "min_tokens": st.sampled_from([0, 3]),
        "stop_token_ids": st.sampled_from([(), (8, 9)]),
        "ignore_eos": st.booleans(),
        "logit_bias": st.sampled_from([{}, {4: 2.5, 11: -100.0}]),
        "allowed_token_ids": st.sampled_from([(), (4, 9, 11, 12, 20)]),
        "bad_word_ids": st.sampled_from([(), ((4,), (1, 12), (2, 0, 9))]),
        "logprobs": st.sampled_from([None, 2]),
    },
)
rows = st.lists(
    st.builds(Row, st.integers(0, 2**63 - 1), st.lists(st.integers(0, VOCAB - 1), max_size=6), params),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(rows=rows, logits_seed=st.integers(0, 10_000), scale=st.sampled_from([0.5, 3.0, 15.0]))
def test_any_mixed_batch_samples_what_the_rules_say(rows: list[Row], logits_seed: int, scale: float) -> None:
    logits = random_logits(len(rows), seed=logits_seed, scale=scale)
    sequences = [sequence([1, 2, 2], row.output, seed=row.seed, **row.params) for row in rows]
    for i, (token, s) in enumerate(zip(sample(logits, *sequences), sequences, strict=True)):
        row_logits = logits[i].numpy()
        if s.sampling.temperature == 0:
            assert token == adjusted(row_logits, s).argmax()
        else:
            expected, lead = draw(row_logits, s)
            assert token == expected or lead < 1e-4


@settings(max_examples=50, deadline=None)
@given(rows=rows, logits_seed=st.integers(0, 10_000), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_row_gets_the_same_token_whatever_the_batch(rows: list[Row], logits_seed: int, dtype: torch.dtype) -> None:
    logits = random_logits(len(rows), seed=logits_seed).to(dtype)  # bfloat16 has many ties
    sequences = [sequence([1], row.output, seed=row.seed, **row.params) for row in rows]
    together = Sampler(EOS).sample(logits, sequences)
    alone = [Sampler(EOS).sample(logits[i : i + 1], [s])[0] for i, s in enumerate(sequences)]
    backwards = Sampler(EOS).sample(logits.flip(0), sequences[::-1])[::-1]
    assert together == alone == backwards


def test_a_large_vocabulary_with_few_likely_tokens_is_sampled_alike() -> None:
    logits = random_logits(1, 5000, scale=0.1)
    logits[0, :20] += 40  # so few can win that noise is made for them alone
    flat = logits.clone()
    flat[0, 20:] += 30  # more can win, none of them is likely
    tokens = [sample(logits, sequence(seed=i)) for i in range(50)]
    assert len({token for [token] in tokens}) > 5
    assert tokens == [sample(flat, sequence(seed=i)) for i in range(50)]


def test_penalties_count_as_documented() -> None:
    s = sequence([1, 2], [2, 4, 4], repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    scores = torch.tensor([[1.0, 1.0, -1.0, 1.0, 3.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    _penalize(scores, [s, sequence()])
    assert scores.tolist() == [[1.0, 0.5, -2.75, 1.0, 0.25], [1.0] * 5]


def test_noise_never_reaches_further_than_what_is_left_out() -> None:
    highest, lowest = _gumbel(_to_uniform(torch.tensor([0, 2**32 - 1])))
    assert 25 < highest - lowest < _REACH


def test_min_tokens_masks_eos_and_stop_tokens_until_enough_are_out() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [3, 5, 8]] = torch.tensor([30.0, 29.0, 28.0])
    logits[0, 10] = 5
    options = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (8,)}
    assert sample(logits, sequence(output=[0], **options)) == [10]
    assert sample(logits, sequence(output=[0, 0], **options)) == [3]
    assert sample(logits, sequence(output=[0], ignore_eos=True, **options)) == [3]


def test_a_bad_word_is_not_completed_and_none_is_forbidden_where_nothing_would_be_left() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [5, 8]] = torch.tensor([30.0, 29.0])
    options = {"temperature": 0.0, "bad_word_ids": ((9, 6, 5), (7,))}
    outputs = ([], [9], [6], [9, 6], [0, 9, 6], [9, 6, 0])
    assert [sample(logits, sequence([9, 6], out, **options))[0] for out in outputs] == [5, 5, 5, 8, 8, 5]
    for allowed in ((3,), (7,)):  # EOS before min_tokens, and a bad word
        assert sample(logits, sequence(allowed_token_ids=allowed, min_tokens=2, **options)) == list(allowed)


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    logits = random_logits(4)
    sequences = [
        sequence(temperature=0.0, logprobs=3, logit_bias={7: 100.0}),
        sequence(temperature=0.0),
        sequence(temperature=0.0, logprobs=0),
        sequence(temperature=0.0, logprobs=3, logprob_token_ids=(9, 7, 2), logit_bias={7: 100.0}),
    ]
    first, second, third, fourth = Sampler(EOS).sample(logits, sequences)
    raw = logits.log_softmax(-1)
    assert first.token_id == 7
    assert first.logprobs is not None
    assert first.logprobs.logprob == pytest.approx(raw[0, 7].item())
    assert [token_id for token_id, _ in first.logprobs.top] == logits[0].topk(3).indices.tolist()
    assert [value for _, value in first.logprobs.top] == pytest.approx(raw[0].topk(3).values.tolist())
    assert second.logprobs is None
    assert third.logprobs is not None
    assert third.logprobs.top == []
    assert fourth.logprobs is not None
    assert [token_id for token_id, _ in fourth.logprobs.top] == [7, 9, 2], "the sampled one first"
    assert [value for _, value in fourth.logprobs.top] == pytest.approx(raw[3, [7, 9, 2]].tolist())


def test_a_tiny_temperature_is_greedy() -> None:
    logits = random_logits(1)
    assert sample(logits, sequence(temperature=1e-9, seed=4)) == logits.argmax(-1).tolist()
