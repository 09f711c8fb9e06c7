"""Answers with a grammar match it, from a model whose answers are noise."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton import LLM, SamplingParams
from baton_proto.grammar import Grammar
from tests.baton.schema_answers import schema_answers
from tests.service import ON_DEVICE


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, **ON_DEVICE | {"kv_memory": "16MiB"}) as llm:
        yield llm


def test_every_complete_answer_validates_against_its_schema_and_other_keywords_are_refused_by_name_and_path(
    llm: LLM,
) -> None:
    found = schema_answers(llm, 100, seed=1)
    assert found.wrong == []
    assert found.valid > 60
    assert found.refused == 10


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar("regex", "[a-f]{3,8}-[0-9]{2}"), "[a-f]{3,8}-[0-9]{2}"),
        (Grammar("choice", choices=("yes", "no", "perhaps")), "yes|no|perhaps"),
        (Grammar("ebnf", 'root ::= "(" root ")" | "x"'), r"\(*x\)*"),
    ],
    ids=["regex", "choice", "ebnf"],
)
def test_answers_match_other_grammars(llm: LLM, grammar: Grammar, pattern: str) -> None:
    answers = llm.generate(["Say it."] * 8, SamplingParams(max_tokens=60, seed=3, grammar=grammar), progress=False)
    for answer in answers:
        assert answer.finish_reason != "stop" or re.fullmatch(pattern, answer.text), answer.text
    assert any(answer.finish_reason == "stop" for answer in answers)


def test_neighbours_without_a_grammar_answer_as_they_do_alone(llm: LLM) -> None:
    plain = SamplingParams(max_tokens=30, seed=5)
    (alone,) = llm.generate("A relay race", plain, progress=False)
    constrained = SamplingParams(max_tokens=30, seed=5, logprobs=2, grammar=Grammar("json_object"))
    beside, answer = llm.generate(["A relay race"] * 2, [plain, constrained], progress=False)
    assert beside.token_ids == alone.token_ids
    assert answer.text.lstrip().startswith("{")
    assert len(answer.logprobs) == len(answer.token_ids)
