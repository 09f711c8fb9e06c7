"""Grammars, in llguidance's Lark, of answers with tool calls, thoughts and formats: one function per family writes a
call."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from router.parsing.families import ReasoningFamily
from router.parsing.parsing import ModelFamilies
from router.parsing.text_grammars import text_terminals
from runtime.errors import InvalidRequestError
from runtime.grammar.words.lark_rules import LarkRules

Schemas = Sequence[tuple[str, Mapping[str, Any]]]
"""Name of each tool that may be called, and the JSON schema of its parameters."""
Thought = Literal["may begin", "has begun", "has ended"]
"""Where the prompt leaves the model's thought."""
Rest = Literal["calls", "text with calls", "calls or format", "format"]
"""What stands behind the thought. A format is the caller's grammar, in Lark @format."""

_LINE_END = '"\\n"'
_SPACES = r"/\s{0,4}/"
_SPACE = "/ ?/"
_COMMA, _COLON = r"/,\s{0,4}/", r"/:\s{0,4}/"


def answer_grammar(families: ModelFamilies, tools: Schemas, many: bool, thought: Thought, rest: Rest) -> str | None:
    """Writes the grammar of an answer; None: the family's calls cannot be enforced, or not told from a text. `many`:
    more than one call may be made. Raises InvalidRequestError."""
    rules = LarkRules(families.marks)
    head, body = _head(rules, families.reasoning, thought), _format(rules, families.reasoning)
    if rest != "format":
        try:
            calls = _calls(rules, families, tools, many, rest)
        except ValueError as error:
            raise InvalidRequestError("tools", f"have a schema that cannot be followed: {error}") from error
        if calls is None:
            return None
        body = f"({calls} | {body})" if rest == "calls or format" else calls
    return "\n".join((f"start: {head}{body}", *rules.lines))


def _head(rules: LarkRules, thinking: ReasoningFamily | None, thought: Thought) -> str:
    if thinking is None or thought == "has ended":
        return ""
    rest = f"{rules.text_until(thinking.closes)} {_SPACES} "
    if thinking.next_part:
        rest += f"({rules.literal(thinking.next_part)})? "
    return rest if thought == "has begun" else f"({rules.literal(thinking.opens)} {rest})? "


def _format(rules: LarkRules, thinking: ReasoningFamily | None) -> str:
    heads = [rules.literal(head) for head in thinking.answers] if thinking is not None else []
    return f"({' | '.join(heads)})? @format" if heads else "@format"


def _calls(rules: LarkRules, families: ModelFamilies, tools: Schemas, many: bool, rest: Rest) -> str | None:
    family, name = families.tools, families.tool_name or ""
    form = _FORMS.get(name) or (_LOOSE_FORMS.get(name) if rest == "calls or format" else None)
    if form is None or family is None:
        return None
    mark = family.opens[0]
    if rest != "text with calls":
        return form(rules, tools, many, rules.literal(mark))
    if family.bare:
        return None
    call = form(rules, tools, False, rules.text_until(mark))
    return f"({call}){'*' if many else '?'} {rules.text_without(mark)}"


def _json_calls(rules: LarkRules, tools: Schemas, arguments: str) -> str:
    calls = [f'"{{\\"name\\": \\"{name}\\", \\"{arguments}\\": " {rules.json(schema)} "}}"' for name, schema in tools]
    return rules.rule(" | ".join(calls))


def _repeated(call: str, between: str, many: bool) -> str:
    return f"{call} ({between} {call})*" if many else call


def _hermes(rules: LarkRules, tools: Schemas, many: bool, opens: str) -> str:
    call = _json_calls(rules, tools, "arguments")
    tagged = rules.rule(f'{opens} "\\n" {call} "\\n" {rules.literal("</tool_call>")}')
    return _repeated(tagged, _LINE_END, many)


def _llama3_json(rules: LarkRules, tools: Schemas, many: bool, opens: str) -> str:
    """The family may leave out its mark. A format may begin as a call does, and because of what can be the same piece
    of text the longest is taken, calls have the pieces of JSON."""
    calls = []
    for name, schema in tools:
        begin = f'"{{" "\\"name\\"" ":" {_SPACE} {json.dumps(json.dumps(name))} "," {_SPACE}'
        calls.append(f'{begin} "\\"parameters\\"" ":" {_SPACE} {rules.json(schema)} "}}"')
    written = _repeated(rules.rule(" | ".join(calls)), '"; "', many)
    return f"({opens})? {written}"


def _mistral(rules: LarkRules, tools: Schemas, many: bool, opens: str) -> str:
    if "[ARGS]" in rules.marks.ids:
        named = [f'"{name}" {rules.literal("[ARGS]")} {rules.json(schema)}' for name, schema in tools]
        return _repeated(rules.rule(f"{opens} ({' | '.join(named)})"), "", many)
    calls = _repeated(_json_calls(rules, tools, "arguments"), '", "', many)
    return f'{opens} "[" {calls} "]"'


def _deepseek(rules: LarkRules, tools: Schemas, many: bool, opens: str) -> str:
    begin, end = rules.literal("<｜tool▁call▁begin｜>"), rules.literal("<｜tool▁call▁end｜>")
    function = f'"function" {rules.literal("<｜tool▁sep｜>")}'
    calls = [f'"{name}\\n```json\\n" {rules.json(schema)}' for name, schema in tools]
    call = rules.rule(f'{begin} {function} ({" | ".join(calls)}) "\\n```" {end}')
    closes = rules.literal("<｜tool▁calls▁end｜>")
    return f"{opens} {_repeated(call, _LINE_END, many)} {closes}"


def _qwen_coder(rules: LarkRules, tools: Schemas, many: bool, opens: str) -> str:
    """Parameters come in the order of the schema; those that it does not require may be left out."""
    calls = [
        rules.rule(" ".join((f'"<function={name}>\\n"', *_parameters(rules, name, schema)))) for name, schema in tools
    ]
    closes = rules.literal("</tool_call>")
    tagged = rules.rule(f'{opens} "\\n" ({" | ".join(calls)}) "</function>\\n" {closes}')
    return _repeated(tagged, _LINE_END, many)


def _parameters(rules: LarkRules, tool: str, schema: Mapping[str, Any]) -> list[str]:
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


def _harmony(rules: LarkRules, tools: Schemas, many: bool, opens: str) -> str:
    """The one call of an answer, which ends with it."""
    calls = [f"{rules.literal(f'{name} <|constrain|>json<|message|>')} {rules.json(schema)}" for name, schema in tools]
    return f"{opens} ({' | '.join(calls)})"


def _pythonic(rules: LarkRules, tools: Schemas, many: bool, opens: str) -> str:
    """Arguments are any literals of Python, because no JSON schema describes them."""
    value = f"rule_{len(rules.lines)}"
    text = r"""/"([^"\\]|\\(.|\n))*"/ | /'([^'\\]|\\(.|\n))*'/"""
    some = f"({value} ({_COMMA} {value})*)?"
    pairs = f"({value} {_COLON} {value} ({_COMMA} {value} {_COLON} {value})*)?"
    number = r"/-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?/"
    rules.rule(f'{text} | {number} | "True" | "False" | "None" | "[" {some} "]" | "{{" {pairs} "}}"')
    argument = rules.rule(f'/[A-Za-z_][A-Za-z0-9_]*/ "=" {value}')
    names = " | ".join(json.dumps(name) for name, _ in tools)
    call = rules.rule(f'({names}) "(" ({argument} ({_COMMA} {argument})*)? ")"')
    return f'({opens})? "[" {_repeated(call, _COMMA, many)} "]"'


_FORMS: Mapping[str, Callable[[LarkRules, Schemas, bool, str], str]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen_coder,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "deepseek_v3": _deepseek,
    "harmony": _harmony,
}
"""(rules, tools, may there be many calls, what stands where the first one opens)"""
_LOOSE_FORMS: Mapping[str, Callable[[LarkRules, Schemas, bool, str], str]] = {"pythonic": _pythonic}
"""They keep no schema, so they let calls through and enforce none."""
