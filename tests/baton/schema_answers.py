"""What a model answers to random JSON schemas, whether it matches them, and how what nobody follows is refused."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

from baton import LLM, SamplingParams
from baton_proto.grammar import Grammar
from runtime.errors import InvalidRequestError
from tests.baton.random_schemas import never_followed, random_schema
from tests.baton.schema_judge import mismatch

MAX_TOKENS = 200
PROMPT = "Say something."


@dataclass(slots=True)
class SchemaAnswers:
    """`cut`: answers that `max_tokens` has ended, so they are beginnings. `refused`: schemas with a keyword that no
    grammar follows, refused with its name and path. `wrong`: what is not as it should be, in words."""

    valid: int = 0
    cut: int = 0
    refused: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)


def schema_answers(
    llm: LLM, count: int, seed: int, max_tokens: int = MAX_TOKENS, *, never_followed_in: int = 10
) -> SchemaAnswers:
    """Of `count` random schemas, greedy and seeded; one of `never_followed_in` is to be refused."""
    source, found = random.Random(seed), SchemaAnswers()
    schemas: list[dict[str, Any]] = []
    for number in range(count):
        if number % never_followed_in:
            schemas.append(random_schema(source))
        elif why := _not_refused(llm, *never_followed(source)):
            found.wrong.append(why)
        else:
            found.refused += 1
    params = [_params(source, number, schema, max_tokens) for number, schema in enumerate(schemas)]
    for schema, answer in zip(schemas, llm.generate([PROMPT] * len(schemas), params, progress=False), strict=True):
        found.tokens += len(answer.token_ids)
        if answer.finish_reason != "stop":
            found.cut += 1
        elif why := mismatch(schema, answer.text):
            found.wrong.append(why)
        else:
            found.valid += 1
    return found


def _params(source: random.Random, seed: int, schema: dict[str, Any], max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=source.choice([0.0, 1.0]),
        max_tokens=max_tokens,
        seed=seed,
        min_tokens=source.choice([0, 5]),
        top_p=source.choice([1.0, 0.9]),
        ignore_eos=source.random() < 0.1,
        grammar=_grammar(schema),
    )


def _grammar(schema: dict[str, Any]) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def _not_refused(llm: LLM, schema: dict[str, Any], path: str) -> str:
    """What is wrong with the refusal of the keyword that ends `path`; empty when nothing is."""
    keyword = path.rpartition(".")[2]
    try:
        llm.generate(PROMPT, SamplingParams(max_tokens=1, grammar=_grammar(schema)), progress=False)
    except InvalidRequestError as error:
        told = error.problem
    else:
        told = "nothing"
    if told.startswith(f"uses '{keyword}' at {path}, "):
        return ""
    return f"{json.dumps(schema, ensure_ascii=False)} has a wrong {path}, and the refusal says {told}"
