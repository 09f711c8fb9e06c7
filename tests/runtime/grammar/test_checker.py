"""Hostile grammars in front of a router's helper process."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton_proto.grammar import Grammar
from runtime.errors import InvalidRequestError, UnavailableError
from runtime.grammar.checker import GrammarChecker
from runtime.grammar.helper import MAX_HELD_BYTES
from runtime.grammar.schemas import MAX_DEPTH
from tests.tiny_model import EOS_TOKEN_IDS, VOCAB_SIZE


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A name that no other test's helper has, though routers of other tests run in this process, too."""
    link = tmp_path_factory.mktemp("checked") / "model"
    link.symlink_to(tiny_model)
    return link


@pytest.fixture(scope="module")
def checker(folder: Path) -> Iterator[GrammarChecker]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.grammar.checker.TIMEOUT_S", 60.0)  # other tests may hold the cores meanwhile
        checker = GrammarChecker(folder, VOCAB_SIZE, EOS_TOKEN_IDS)
        yield checker
        checker.close()


def helper_pid(folder: Path) -> int:
    (helper,) = (child for child in psutil.Process().children() if str(folder) in child.cmdline())
    return helper.pid


def chained(link: Callable[[dict[str, Any]], Any], count: int = 1500) -> str:
    definitions = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return json.dumps({"$defs": definitions | {f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"})


LINKS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "allOf": lambda to: {"allOf": [to]},
    "bare": lambda to: to,
    "items": lambda to: {"type": "array", "items": to},
    "properties": lambda to: {"type": "object", "properties": {"a": to}},
    "patternProperties": lambda to: {"type": "object", "patternProperties": {"^a": to}},
    "prefixItems": lambda to: {"type": "array", "prefixItems": [to]},
}
HOSTILE = {
    **{f"chain of {name}": (Grammar("json_schema", chained(link)), "deep") for name, link in LINKS.items()},
    # What is not looked through before it is compiled ends the process that compiles it.
    "chain in a tool": (Grammar("ebnf", f"start: %json {chained(LINKS['items'])}"), "nested too deeply"),
    "much when compiled": (Grammar("json_schema", '{"type": "integer", "multipleOf": 50021}'), "MiB when compiled"),
    "more while compiled": (Grammar("json_schema", '{"type": "integer", "multipleOf": 3999971}'), "to compile"),
    "nested": (Grammar("json_schema", '{"items":' * 970 + "{}" + "}" * 970), "nested too deeply"),
}


async def checked(checker: GrammarChecker, grammar: Grammar) -> None:
    """Tries again where the machine was too busy."""
    while True:
        with contextlib.suppress(UnavailableError):
            await checker.check_soon(grammar, "response_format")
            return


@pytest.mark.parametrize(("grammar", "problem"), HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_grammar_is_refused_and_costs_nobody_else(
    checker: GrammarChecker, grammar: Grammar, problem: str
) -> None:
    other = asyncio.create_task(checker.check_soon(Grammar("regex", f"another {problem}"), "guided_regex"))
    with pytest.raises(InvalidRequestError) as refusal:
        await checked(checker, grammar)
    assert refusal.value.field == "response_format"
    assert problem in refusal.value.problem
    assert 0 < (await other).held_bytes < MAX_HELD_BYTES


async def test_checks_of_a_helper_that_dies_are_answered_by_the_next(checker: GrammarChecker, folder: Path) -> None:
    checks = [
        asyncio.create_task(checker.check_soon(Grammar("json_schema", f'{{"multipleOf": {20_000 + i}}}'), "schema"))
        for i in range(3)
    ]
    await checker.check_soon(Grammar("regex", "a"), "guided_regex")
    os.kill(helper_pid(folder), signal.SIGKILL)
    assert all(grammar.held_bytes for grammar in await asyncio.gather(*checks))


async def test_a_chain_within_the_bounds_is_allowed(checker: GrammarChecker) -> None:
    schema = chained(LINKS["items"], MAX_DEPTH // 2 - 5)
    assert (await checker.check_soon(Grammar("json_schema", schema), "schema")).held_bytes
