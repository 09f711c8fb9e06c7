"""No regular expression of the product, and nothing else that reads a caller's text, takes a time that grows faster
than the text. Hostile texts are doubled, and the ratio of this thread's CPU times is looked at."""

import ast
import contextlib
import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Raw
from tokenizers import AddedToken

from baton_proto.grammar import Grammar
from router.api.dialects.json_body import decode_body
from router.api.openai.types import CompletionBody
from router.api.wishes.json_shape import MAX_DEPTH, check_depth, check_shape
from router.api.wishes.sampling_options import MAX_STOP_CHARS
from router.api.wishes.tools import read_arguments, tool_use
from router.api.wishes.validation import seconds_of
from router.parsing import reader
from router.parsing.call_grammars import answer_grammar
from router.parsing.families import TOOL_FAMILIES
from router.parsing.parsing import ModelFamilies
from router.text.control_tokens import ControlTokens
from router.text.segment_cache import begins
from router.text.stop_strings import StopStrings
from runtime.errors import InvalidRequestError, shown
from runtime.grammar.bounds import written_out
from runtime.grammar.source import json_source, longest_text
from runtime.grammar.structural_tags import tags_source
from runtime.grammar.words.marks import Marks
from runtime.security.bearer_keys import BearerKeys
from runtime.security.secret import Secret
from tests.linear_texts import LONGEST, SIGNS, alphabet, hostile_texts, superlinear

ROOT = Path(__file__).parent.parent
FOLDERS = ("baton", "decode_worker", "engine", "kvtransfer", "planner", "prefill_worker", "proto", "router", "runtime")
FOLDERS += ("simulator", "worker")
PER_CHAR_OF_PYTHON_S = 10e-6  # of a processor
METHODS = ("match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer")
CALLS = {f"re.{method}" for method in (*METHODS, "compile")}
FROM_THE_START = {"match", "fullmatch"}  # all others begin at each character
MARKS = ("<tool_call>", "</tool_call>", *(f"<|reserved_special_token_{i}|>" for i in range(9)))
MADE: dict[str, Callable[[], "re.Pattern[Any]"]] = {
    "router/parsing/reader.py _any_of": lambda: reader._any_of(MARKS),
    "runtime/grammar/words/marks.py _pattern": lambda: re.compile(f"({'|'.join(map(re.escape, MARKS))})"),
    "router/text/segment_cache.py boundary_pattern": lambda: re.compile("|".join(map(re.escape, MARKS))),
    "router/text/control_tokens.py _cuts": lambda: re.compile(
        f"<(?={'|'.join(re.escape(mark[1:]) for mark in MARKS)})"
    ),
    "router/api/operators/ui_endpoints.py _page": lambda: re.compile(b"<script>(.*?)</script>", re.S),
}
"""What functions make of their arguments."""
OURS = {
    "router/api/operators/ui_endpoints.py _page": "reads our own page",
}
"""Those that no caller's text reaches, and why."""


@dataclass(frozen=True, slots=True)
class Use:
    """A call of `re`. `name`: of the value or function that has it."""

    path: Path
    name: str
    call: ast.Call

    @property
    def key(self) -> str:
        return f"{self.path.relative_to(ROOT)} {self.name}"

    def pattern(self) -> "re.Pattern[Any]":
        if self.key in MADE:
            return MADE[self.key]()
        module = ".".join(self.path.relative_to(ROOT).with_suffix("").parts).removeprefix("proto.")
        known = {"re": re}
        try:
            arguments = self._evaluated(known)
        except NameError:
            arguments = self._evaluated(vars(importlib.import_module(module)))
        return re.compile(*arguments)

    def _evaluated(self, known: dict[str, Any]) -> list[Any]:
        """The pattern and its flags, which stand last in every call."""
        told = self.call.args
        wanted = [told[0], *(one for one in told[1:] if ast.unparse(one).startswith("re."))]
        return [eval(ast.unparse(one), known) for one in wanted]


def uses() -> list[Use]:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [use for path in files if "import re\n" in (text := path.read_text()) for use in _of(path, ast.parse(text))]


def _of(path: Path, tree: ast.AST, name: str = "") -> Iterator[Use]:
    for node in ast.iter_child_nodes(tree):
        inner = name
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not name:
            inner = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in CALLS:
            yield Use(path, inner, node)
        yield from _of(path, node, inner)


def methods_of(use: Use, sources: str) -> set[str]:
    """How the pattern is used, as far as can be seen."""
    if (method := ast.unparse(use.call.func).removeprefix("re.")) != "compile":
        return {method}
    return set(re.findall(rf"\b{re.escape(use.name)}(?:\[\w+\])?\.({'|'.join(METHODS)})\(", sources)) or {"finditer"}


USES = uses()
SOURCES = "\n".join(path.read_text() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("use", [use for use in USES if use.key not in OURS], ids=lambda use: use.key)
def test_a_regular_expression_takes_twice_as_long_for_twice_the_text(use: Use) -> None:
    assert not slow_texts(use.pattern(), methods_of(use, SOURCES) <= FROM_THE_START)


def slow_texts(pattern: "re.Pattern[Any]", from_the_start: bool, longest: int = LONGEST) -> list[str]:
    """The first that takes too long, if any."""
    nothing = pattern.pattern[:0]
    read = pattern.fullmatch if from_the_start else partial(pattern.subn, nothing)
    for text in hostile_texts(alphabet(pattern)):
        of_kind = text if nothing == "" else lambda length, text=text: text(length).encode()
        if told := superlinear(read, of_kind, longest=longest):
            return [told]
    return []


@pytest.mark.parametrize(
    "pattern",
    [
        r"\\.|\(|\)|\{\s*(\d{1,9})?\s*,?\s*(\d{1,9})?\s*\}",
        r"\[\^?\]?(?:\\.|[^\]\\])*\]|.",
        r'"(?:[^"\\]|\\.)*+"',
        r"(?m)(?<=: )%json \{.*\}$",
        r"(a+)+b",
    ],
)
def test_one_that_takes_longer_is_found(pattern: str) -> None:
    """Texts are longer than others need, so that the growth stands out on any machine."""
    assert slow_texts(re.compile(pattern), from_the_start=False, longest=4 * LONGEST)


def _followed(text: str) -> None:
    strings = StopStrings(("?" * MAX_STOP_CHARS, text[: MAX_STOP_CHARS - 1] + "?"))  # the second holds all back
    for sign in text:
        strings.push(sign)


def _tools(text: str) -> None:
    field = {"type": "string", "description": text, "pattern": text, "title": text}
    function = {"name": "f", "description": text, "parameters": {"type": "object", "properties": {text: field}}}
    use = tool_use(Raw(msgspec.json.encode([{"type": "function", "function": function}])), "auto", None)
    for name in TOOL_FAMILIES:
        answer_grammar(ModelFamilies(tool_name=name), list(use.schemas().items()), True, "may begin", "calls or format")


def _tags(text: str) -> None:
    tag = {"type": "tag", "begin": text, "content": {"type": "regex", "pattern": text}, "end": text}
    tags_source({"format": {"type": "triggered_tags", "triggers": [text[:9]], "tags": [tag]}}, Marks())


CONTROL = ControlTokens([AddedToken(mark, special=True) for mark in MARKS], "", ())
READERS: dict[str, Callable[[str], object]] = {
    "repeats of a grammar": written_out,
    "texts of EBNF": lambda text: longest_text(Grammar("ebnf", text)),
    "texts of a schema": lambda text: longest_text(Grammar("json_schema", text)),
    "structural tags": _tags,
    "tools and their grammars": _tools,
    "stop strings": _followed,
    "a body": lambda text: decode_body(text.encode(), CompletionBody),
    "the shape of a long body": lambda text: check_shape(b"[" * MAX_DEPTH + text.encode()),
    "the depth of a field": lambda text: check_depth("tools", "[" * MAX_DEPTH + text),
    "a schema": lambda text: json_source({"$ref": f"#/{text}", "properties": {text: {"pattern": text}}}),
    "arguments of a call": lambda text: read_arguments("arguments", text),
    "a refusal": lambda text: InvalidRequestError("field", text),
    "a refusal of one word": lambda text: shown(text),
    "a time": lambda text: seconds_of("timeout", text),
    "a key": lambda text: BearerKeys.plain([Secret("k" * 32)]).accepts(text.encode()),
    "control tokens of a message": lambda text: CONTROL.plain([{"role": "user", "content": text}], {"x": [text]}),
    "marks of a prompt": lambda text: list(begins(re.compile("|".join(map(re.escape, MARKS))), text)),
}
"""What reads a caller's text; how answers are taken apart, tests/router/parsing/test_cost.py has."""
UNITS = (*SIGNS, "]", "}", "1,", '\\"', ": %json {", "<|reserved_special_token_")


@pytest.mark.parametrize("name", READERS)
def test_a_reader_takes_twice_as_long_for_twice_the_text(name: str) -> None:
    def read(text: str) -> None:
        with contextlib.suppress(ValueError, InvalidRequestError):
            READERS[name](text)

    for text in hostile_texts(UNITS):
        assert not (told := superlinear(read, text, PER_CHAR_OF_PYTHON_S, LONGEST // 4)), told


def test_every_row_is_of_a_regular_expression_that_is_there() -> None:
    assert {*MADE, *OURS} <= {use.key for use in USES}
