"""Grammars, in llguidance's Lark, of answers that must call tools: one function per family writes a call."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from router.parsing.parsing import ModelFamilies
from router.parsing.text_grammars import text_terminals
from runtime.grammar.source import JSON_OPTIONS

Schemas = Sequence[tuple[str, Mapping[str, Any]]]
"""Name of each tool that may be called, and the JSON schema of its parameters."""


_ANYTHING = "/(.|\\n)*/"
_LINE_END = '"\\n"'
_SPACES = r"/\s{0,4}/"


class _Rules:
    """The rules of one grammar as they are written."""

    def __init__(self, marks: Mapping[str, int]) -> None:
        self.marks = marks
        self.lines: list[str] = []

    def mark(self, text: str) -> str:
        """Special tokens are written as such, because a text that looks like them is made of other tokens."""
        among = f"({'|'.join(map(re.escape, self.marks))})" if self.marks else r"(?!)"
        parts = [part for part in re.split(among, text) if part]
        return " ".join(f"<[{self.marks[part]}]>" if part in self.marks else json.dumps(part) for part in parts)

    def rule(self, body: str, attribute: str = "") -> str:
        """Returns the name of the rule."""
        name = f"rule_{len(self.lines)}"
        self.lines.append(f"{name}{attribute}: {body}")
        return name

    def json(self, schema: Any) -> str:
        return self.rule("%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS}))

    def text_without(self, mark: str) -> str:
        """No special token is a part of it anyway."""
        return self.rule(_ANYTHING) if mark in self.marks else self._terminal(_without(mark))

    def text_before(self, end: str, terminals: Sequence[str]) -> str:
        """A text that matches all `terminals`, and the end behind it: one terminal, because one takes all it can."""
        return self._terminal(f"({' & '.join((_without(end.strip()), *terminals))}) {json.dumps(end)}")

    def _terminal(self, body: str) -> str:
        name = f"TEXT_{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def text_until(self, end: str) -> str:
        """With the end."""
        if end in self.marks:
            return f"{self.rule(_ANYTHING)} {self.mark(end)}"
        return self.rule(_ANYTHING, f"[suffix={json.dumps(end)}]")


def call_grammar(
    families: ModelFamilies, tools: Schemas, many: bool, in_reasoning: bool, free: bool = False
) -> str | None:
    """None: the family's calls cannot be enforced. many: more than one call may follow. free: text may stand around
    calls, or instead of them; what follows the mark that opens one is a call. Raises InvalidRequestError."""
    form, family = _FORMS.get(families.tool_name or ""), families.tools
    if form is None or family is None or (free and not family.opens) or (free and family.bare):
        return None
    rules = _Rules(families.marks)
    head, thinking = "", families.reasoning
    if thinking is not None:
        thought = rules.text_until(thinking.closes)
        thought += f" {_SPACES} "
        if thinking.next_part:
            thought += f"({rules.mark(thinking.next_part)})? "
        head = thought if in_reasoning else f"({rules.mark(thinking.opens)} {thought})? "
    mark = family.opens[0]
    if free:
        call = form(rules, tools, False, rules.text_until(mark))
        body = f"({call}){'*' if many else '?'} {rules.text_without(mark)}"
    else:
        body = form(rules, tools, many, rules.mark(mark))
    return "\n".join((f"start: {head}{body}", *rules.lines))


def _without(text: str) -> str:
    return f"{_ANYTHING} & ~/(.|\\n)*{_escaped(text)}(.|\\n)*/"


def _escaped(text: str) -> str:
    """As a regular expression of llguidance, in which escaped angle brackets are no brackets."""
    return re.sub(r"([\[\]|()/.*+?{}^$\\])", r"\\\1", text)


def _json_calls(rules: _Rules, tools: Schemas, arguments: str) -> str:
    calls = [f'"{{\\"name\\": \\"{name}\\", \\"{arguments}\\": " {rules.json(schema)} "}}"' for name, schema in tools]
    return rules.rule(" | ".join(calls))


def _repeated(call: str, between: str, many: bool) -> str:
    return f"{call} ({between} {call})*" if many else call


def _hermes(rules: _Rules, tools: Schemas, many: bool, opens: str) -> str:
    call = _json_calls(rules, tools, "arguments")
    tagged = rules.rule(f'{opens} "\\n" {call} "\\n" {rules.mark("</tool_call>")}')
    return _repeated(tagged, _LINE_END, many)


def _llama3_json(rules: _Rules, tools: Schemas, many: bool, opens: str) -> str:
    """Without its mark, which the family may leave out."""
    return _repeated(_json_calls(rules, tools, "parameters"), '"; "', many)


def _mistral(rules: _Rules, tools: Schemas, many: bool, opens: str) -> str:
    if "[ARGS]" in rules.marks:
        named = [f'"{name}" {rules.mark("[ARGS]")} {rules.json(schema)}' for name, schema in tools]
        return _repeated(rules.rule(f"{opens} ({' | '.join(named)})"), "", many)
    calls = _repeated(_json_calls(rules, tools, "arguments"), '", "', many)
    return f'{opens} "[" {calls} "]"'


def _deepseek(rules: _Rules, tools: Schemas, many: bool, opens: str) -> str:
    begin, end = rules.mark("<｜tool▁call▁begin｜>"), rules.mark("<｜tool▁call▁end｜>")
    function = f'"function" {rules.mark("<｜tool▁sep｜>")}'
    calls = [f'"{name}\\n```json\\n" {rules.json(schema)}' for name, schema in tools]
    call = rules.rule(f'{begin} {function} ({" | ".join(calls)}) "\\n```" {end}')
    closes = rules.mark("<｜tool▁calls▁end｜>")
    return f"{opens} {_repeated(call, _LINE_END, many)} {closes}"


def _qwen_coder(rules: _Rules, tools: Schemas, many: bool, opens: str) -> str:
    """Parameters come in the order of the schema; those that it does not require may be left out."""
    calls = [
        rules.rule(" ".join((f'"<function={name}>\\n"', *_parameters(rules, name, schema)))) for name, schema in tools
    ]
    closes = rules.mark("</tool_call>")
    tagged = rules.rule(f'{opens} "\\n" ({" | ".join(calls)}) "</function>\\n" {closes}')
    return _repeated(tagged, _LINE_END, many)


def _parameters(rules: _Rules, tool: str, schema: Mapping[str, Any]) -> list[str]:
    written = []
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    for key, inner in (schema.get("properties") or {}).items():
        begin = json.dumps(f"<parameter={key}>\n")
        inner = inner if isinstance(inner, Mapping) else {}
        if inner.get("type") != "string":
            value = f'{rules.json({**definitions, **inner})} "\\n</parameter>\\n"'
        elif terminals := text_terminals(inner, f"{tool}.properties.{key}"):
            value = rules.text_before("\n</parameter>", terminals) + ' "\\n"'
        else:
            value = rules.text_until("</parameter>") + ' "\\n"'
        whole = f"{begin} {value}"
        written.append(whole if key in schema.get("required", ()) else f"({whole})?")
    return written


def _harmony(rules: _Rules, tools: Schemas, many: bool, opens: str) -> str:
    """The one call of an answer, which ends with it."""
    calls = [f"{rules.mark(f'{name} <|constrain|>json<|message|>')} {rules.json(schema)}" for name, schema in tools]
    return f"{opens} ({' | '.join(calls)})"


_FORMS: Mapping[str, Callable[[_Rules, Schemas, bool, str], str]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen_coder,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "deepseek_v3": _deepseek,
    "harmony": _harmony,
}
"""(rules, tools, may there be many calls, what stands where the first one opens). There is none for pythonic calls: no
JSON schema describes their literals."""
