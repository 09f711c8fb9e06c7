"""Which of our sampling parameters reach vLLM, and how; no vLLM is needed to tell."""

from typing import Any, get_args

import pytest

from baton_proto.grammar import Grammar, GrammarKind
from baton_proto.sampling import MAX_SEED, PARAMETERS, SamplingParams
from engine.vllm.sampling import (
    GRAMMAR_FIELDS,
    OF_OUTPUT,
    SAME_NAME,
    TRANSLATED,
    first_token_alone,
    repeats,
    vllm_grammar,
    vllm_sampling,
)

EOS = frozenset({2, 7})


def test_every_parameter_has_its_row() -> None:
    assert sorted(SAME_NAME + TRANSLATED) == sorted(PARAMETERS)
    assert set(GRAMMAR_FIELDS) == set(get_args(GrammarKind))


def test_a_greedy_request_needs_no_random_stream() -> None:
    told = vllm_sampling(SamplingParams(max_tokens=5, temperature=0.0, seed=9), 0, EOS)
    assert (told["temperature"], told["seed"], told["max_tokens"]) == (0.0, None, 5)
    assert told["stop_token_ids"] == [2, 7]


def test_a_replay_goes_on_where_the_answer_was_lost() -> None:
    sampling = SamplingParams(max_tokens=10, min_tokens=3, seed=MAX_SEED, temperature=0.5)
    first, replay = (vllm_sampling(sampling, replayed, EOS) for replayed in (0, 4))
    assert (first["max_tokens"], first["min_tokens"], first["seed"]) == (10, 3, MAX_SEED)
    assert (replay["max_tokens"], replay["min_tokens"]) == (6, 0)
    assert replay["seed"] != first["seed"], "the noise of the first tokens is not used twice"
    assert 0 <= replay["seed"] <= MAX_SEED


@pytest.mark.parametrize("min_tokens", [0, 3])
def test_the_first_token_alone_is_drawn_like_any_first_token(min_tokens: int) -> None:
    told = vllm_sampling(SamplingParams(max_tokens=10, min_tokens=min_tokens, seed=7, temperature=0.5), 0, EOS)
    alone = told | first_token_alone(told)
    assert (alone["max_tokens"], alone["min_tokens"]) == (1, min(1, min_tokens)), "an end counts from there on"
    assert {name for name in told if alone[name] != told[name]} <= {"max_tokens", "min_tokens"}


@pytest.mark.parametrize(("ignore_eos", "grammar", "ends"), [(True, None, [5]), (True, "a", [2, 5, 7])])
def test_whether_an_answer_ends_at_eos(ignore_eos: bool, grammar: str | None, ends: list[int]) -> None:
    """A grammar allows EOS where nothing else may follow."""
    wanted = None if grammar is None else Grammar("regex", grammar)
    sampling = SamplingParams(max_tokens=1, stop_token_ids=(5,), ignore_eos=ignore_eos, grammar=wanted)
    told = vllm_sampling(sampling, 0, EOS)
    assert (told["stop_token_ids"], told["ignore_eos"]) == (ends, grammar is None)


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        (Grammar("json_object"), {"json_object": True}),
        (Grammar("json_schema", "{}"), {"json": "{}"}),
        (Grammar("regex", "a+"), {"regex": "a+"}),
        (Grammar("choice", choices=("a", "b")), {"choice": ["a", "b"]}),
        (Grammar("ebnf", 'root ::= "a"'), {"grammar": 'root ::= "a"'}),
    ],
)
def test_a_grammar_has_vllms_name(grammar: Grammar, told: dict[str, Any]) -> None:
    assert vllm_grammar(grammar) == told


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1.0),
        ("bad_words", ("a",)),
        ("grammar", Grammar("json_object")),
    ],
)
def test_an_answer_with_what_looks_at_the_output_alone_begins_again(name: str, value: Any) -> None:
    sampling = SamplingParams(max_tokens=9, **{name: value})
    assert name in OF_OUTPUT
    assert repeats(sampling)
    assert not repeats(SamplingParams(max_tokens=9, repetition_penalty=1.2, temperature=0.3))
