"""Text of which some parts follow a schema, as vLLM and SGLang write it, in llguidance's Lark.

The older form lists structures and what triggers them; the newer one, xgrammar's, has a `format` that nests.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runtime.errors import shown
from runtime.grammar.schemas import check_depth
from runtime.grammar.words.lark_rules import ANY_TEXT, LarkRules
from runtime.grammar.words.marks import Marks

_SLASH = re.compile(r"\\.|/", re.DOTALL)  # one that is not escaped ends a pattern in Lark
OLDER = '{"structures": [{"begin": ..., "schema": {...}, "end": ...}], "triggers": [...]}'


def tags_source(tag: Any, marks: Marks) -> str:
    """`marks`: of the model. Raises ValueError, which names the field."""
    given = tag["format"] if isinstance(tag, Mapping) and "format" in tag else _newer(tag)
    try:
        return _Format(marks).source(given)
    except RecursionError as error:
        raise ValueError("format is nested too deeply") from error


def _newer(tag: Any) -> Mapping[str, Any]:
    """The older form in the newer one. Raises ValueError."""
    try:
        tags = [
            {
                "begin": each["begin"],
                "content": {"type": "json_schema", "json_schema": {**each["schema"]}},
                "end": each["end"],
            }
            for each in tag["structures"]
        ]
        return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"must be {OLDER}, or have a format: {type(error).__name__} {error}") from error


def _trigger(begin: str, triggers: Sequence[str]) -> str:
    trigger = next((trigger for trigger in triggers if trigger and begin.startswith(trigger)), None)
    if trigger is None:
        raise ValueError(f"no trigger begins {shown(begin)}")
    return trigger


class _Format:
    """The rules of one format as they are written."""

    def __init__(self, marks: Marks) -> None:
        self._rules = LarkRules(marks)

    def source(self, given: Any) -> str:
        start = self._written("format", given)
        return "\n".join((f"start: {start}", f"TEXT: {ANY_TEXT}", *self._rules.lines))

    def _written(self, where: str, given: Any) -> str:
        kind = given.get("type") if isinstance(given, Mapping) else None
        write = _KINDS.get(kind) if isinstance(kind, str) else None
        if write is None:
            raise ValueError(f"{where}.type is {shown(kind)}, must be one of {', '.join(_KINDS)}")
        return write(self, where, given)

    def _schema(self, where: str, given: Mapping[str, Any]) -> str:
        schema = _member(where, given, "json_schema", (dict, bool))
        schema = schema if isinstance(schema, dict) else {} if schema else {"not": {}}
        check_depth(schema)
        return self._rules.json(schema)

    def _constant(self, where: str, given: Mapping[str, Any]) -> str:
        return self._literal(_member(where, given, "value", str))

    def _regex(self, where: str, given: Mapping[str, Any]) -> str:
        pattern = _SLASH.sub(lambda part: "\\/" if part[0] == "/" else part[0], _member(where, given, "pattern", str))
        pattern = pattern.replace("\n", "\\n")
        return self._rules.rule(f"/{pattern}/")

    def _sequence(self, where: str, given: Mapping[str, Any], sign: str = " ") -> str:
        elements = _member(where, given, "elements", list)
        return f"({sign.join(self._written(f'{where}.elements[{i}]', each) for i, each in enumerate(elements))})"

    def _either(self, where: str, given: Mapping[str, Any]) -> str:
        return self._sequence(where, given, " | ")

    def _tag(self, where: str, given: Mapping[str, Any], begin: str | None = None) -> str:
        """`begin`: what of it is still to be written."""
        begin = _member(where, given, "begin", str) if begin is None else begin
        content, end = _member(where, given, "content", dict), _member(where, given, "end", str)
        if content.get("type") == "any_text":
            body = self._rules.text_until(end) if end else "TEXT"
        else:
            body = f"{self._written(f'{where}.content', content)} {self._literal(end)}"
        return self._rules.rule(f"{self._literal(begin)} {body}")

    def _literal(self, text: str) -> str:
        return self._rules.literal(text) if text else ""

    def _triggered(self, where: str, given: Mapping[str, Any]) -> str:
        triggers, tags = _member(where, given, "triggers", list), _member(where, given, "tags", list)
        written = []
        for i, tag in enumerate(tags):
            begin = _member(f"{where}.tags[{i}]", tag, "begin", str)
            trigger = _trigger(begin, [str(each) for each in triggers])
            inner = self._tag(f"{where}.tags[{i}]", tag, begin[len(trigger) :])
            written.append(f"{self._rules.text_until(trigger)} {inner}")
        if not written:
            raise ValueError(f"{where}.tags must have one tag or more")
        either, some = self._rules.rule(" | ".join(written)), bool(given.get("at_least_one"))
        if given.get("stop_after_first"):
            return either if some else f"({either} | TEXT)"
        return f"{either}{'+' if some else '*'} {self._rules.text()}"


_KINDS: Mapping[str, Callable[[_Format, str, Mapping[str, Any]], str]] = {
    "triggered_tags": _Format._triggered,
    "tag": _Format._tag,
    "sequence": _Format._sequence,
    "or": _Format._either,
    "json_schema": _Format._schema,
    "const_string": _Format._constant,
    "regex": _Format._regex,
}


def _member(where: str, given: Any, name: str, kind: Any) -> Any:
    value = given.get(name) if isinstance(given, Mapping) else None
    if not isinstance(value, kind):
        raise ValueError(f"{where}.{name} is missing or of another type")
    return value
