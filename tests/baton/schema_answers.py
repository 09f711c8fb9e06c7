"""What a model answers to random JSON schemas, and whether it matches them."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

import jsonschema

from baton import LLM, SamplingParams
from baton_proto.grammar import Grammar
from tests.baton.random_schemas import random_schema

MAX_TOKENS = 200


@dataclass(slots=True)
class SchemaAnswers:
    """`cut`: answers that `max_tokens` has ended, so they are beginnings. `wrong`: what does not match, in words."""

    valid: int = 0
    cut: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)


def schema_answers(llm: LLM, count: int, seed: int, max_tokens: int = MAX_TOKENS) -> SchemaAnswers:
    """Of `count` random schemas, greedy and seeded. Raises InvalidRequestError when a schema is refused."""
    source, found = random.Random(seed), SchemaAnswers()
    schemas = [random_schema(source) for _ in range(count)]
    params = [_params(source, number, schema, max_tokens) for number, schema in enumerate(schemas)]
    for schema, answer in zip(schemas, llm.generate(["Say something."] * count, params, progress=False), strict=True):
        found.tokens += len(answer.token_ids)
        if answer.finish_reason != "stop":
            found.cut += 1
        elif why := _mismatch(schema, answer.text):
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
        grammar=Grammar("json_schema", json.dumps(schema)),
    )


def _mismatch(schema: dict[str, Any], text: str) -> str:
    """Why an answer is wrong; empty when it is right."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{json.dumps(schema)} gives {text!r}: {error!s:.200}"
    return ""
