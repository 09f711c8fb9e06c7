"""Text of which some parts follow a schema, as vLLM and SGLang write it, in llguidance's Lark.

The older form lists structures and what triggers them; the newer one, xgrammar's, has a `format` that nests.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import llguidance

from runtime.errors import shown
from runtime.grammar.bounds import check_depth

TEXT = "/(.|\\n)*/"
_SLASH = re.compile(r"\\.|/", re.DOTALL)  # one that is not escaped ends a pattern in Lark
OLDER = '{"structures": [{"begin": ..., "schema": {...}, "end": ...}], "triggers": [...]}'


def tags_source(tag: Any, json_options: Any) -> str:
    """`json_options`: of llguidance, for the schemas. Raises ValueError, which names the field."""
    if isinstance(tag, Mapping) and "format" in tag:
        try:
            return _Format(json_options).source(tag["format"])
        except RecursionError as error:
            raise ValueError("format is nested too deeply") from error
    try:
        triggers = [str(trigger) for trigger in tag["triggers"]]
        tags = []
        for each in tag["structures"]:
            trigger = _trigger(each["begin"], triggers)
            check_depth(each["schema"])
            schema = {**each["schema"], "x-guidance": json_options}
            tags.append(llguidance.StructTag(trigger=trigger, begin=each["begin"], grammar=schema, end=each["end"]))
        return llguidance.StructTag.to_grammar(tags, assume_special=False)
    except (KeyError, TypeError, AttributeError, AssertionError) as error:
        raise ValueError(f"must be {OLDER}, or have a format: {type(error).__name__} {error}") from error


def _trigger(begin: str, triggers: Sequence[str]) -> str:
    trigger = next((trigger for trigger in triggers if trigger and begin.startswith(trigger)), None)
    if trigger is None:
        raise ValueError(f"no trigger begins {shown(begin)}")
    return trigger


class _Format:
    """The rules of one format as they are written."""

    def __init__(self, json_options: Any) -> None:
        self._json_options = json_options
        self._lines: list[str] = []

    def source(self, given: Any) -> str:
        start = self._written("format", given)
        return "\n".join((f"start: {start}", f"TEXT: {TEXT}", *self._lines))

    def _rule(self, body: str, attribute: str = "") -> str:
        name = f"rule_{len(self._lines)}"
        self._lines.append(f"{name}{attribute}: {body}")
        return name

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
        return self._rule("%json " + json.dumps({**schema, "x-guidance": self._json_options}))

    def _constant(self, where: str, given: Mapping[str, Any]) -> str:
        return _literal(_member(where, given, "value", str))

    def _regex(self, where: str, given: Mapping[str, Any]) -> str:
        pattern = _SLASH.sub(lambda part: "\\/" if part[0] == "/" else part[0], _member(where, given, "pattern", str))
        pattern = pattern.replace("\n", "\\n")
        return self._rule(f"/{pattern}/")

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
            body = self._rule(TEXT, f"[suffix={json.dumps(end)}]") if end else "TEXT"
        else:
            body = f"{self._written(f'{where}.content', content)} {_literal(end)}"
        return self._rule(f"{_literal(begin)} {body}")

    def _triggered(self, where: str, given: Mapping[str, Any]) -> str:
        triggers, tags = _member(where, given, "triggers", list), _member(where, given, "tags", list)
        written = []
        for i, tag in enumerate(tags):
            begin = _member(f"{where}.tags[{i}]", tag, "begin", str)
            trigger = _trigger(begin, [str(each) for each in triggers])
            opened = self._rule(f"TEXT {_literal(trigger)}", "[lazy]")
            written.append(f"{opened} {self._tag(f'{where}.tags[{i}]', tag, begin[len(trigger) :])}")
        if not written:
            raise ValueError(f"{where}.tags must have one tag or more")
        either, some = self._rule(" | ".join(written)), bool(given.get("at_least_one"))
        if given.get("stop_after_first"):
            return either if some else f"({either} | TEXT)"
        return f"{either}{'+' if some else '*'} {self._rule('TEXT')}"


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


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""
