"""Qwen3-Coder's calls: XML whose values are text or JSON, by the schema of the tool."""

import json
from collections.abc import Mapping
from typing import Any

from router.parsing.call_writer import CallWriter, read_json
from router.parsing.reader import EndedError, Reader, Steps

_ENDS = ("\n</parameter>", "</parameter>")  # a line break around a value is no part of it
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def qwen_coder(reader: Reader, calls: CallWriter) -> Steps[None]:
    """<function=NAME><parameter=KEY>value</parameter>...</function></tool_call>"""
    yield from reader.spaces()
    yield from reader.literal("<function=")
    name = yield from reader.until_sign(">")
    reader.take(1)
    calls.begin(name)
    properties = calls.schemas.get(name, {}).get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    before = "{"
    while True:
        yield from reader.spaces()
        if (yield from reader.starts_with(("</function>",))):
            break
        yield from reader.literal("<parameter=")
        key = yield from reader.until_sign(">")
        reader.take(1)
        calls.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        before = ", "
        yield from _value(reader, calls, properties.get(key))
    calls.arguments("{}" if before == "{" else "}")
    yield from reader.literal("</function>")
    calls.done(reader)
    yield from reader.closing("</tool_call>")


def _value(reader: Reader, calls: CallWriter, schema: Any) -> Steps[None]:
    """Text, lists and objects stream where the schema allows nothing else; any other value is told at its end."""
    types = _types(schema)
    if (yield from reader.starts_with(("\n",))):
        reader.take(1)
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        calls.arguments('"')
        if (yield from reader.until(_ENDS, lambda text: calls.arguments(_escaped(text)))) is None:
            raise EndedError
        calls.arguments('"')
        return
    if types is not None and types <= {"array", "object"}:
        yield from reader.spaces()
        if (yield from reader.starts_with(("[", "{"))):
            yield from reader.value(calls.arguments)
            yield from reader.spaces()
            return (yield from reader.literal("</parameter>"))
    parts: list[str] = []
    if (yield from reader.until(_ENDS, parts.append)) is None:
        raise EndedError
    calls.arguments(_json("".join(parts), types))


def _json(text: str, types: frozenset[str] | None) -> str:
    """A value that is JSON of an allowed type stays, and any other is text where text is allowed."""
    takes_text = types is None or "string" in types
    try:
        value = read_json(text)
    except ValueError:
        word = text.strip().lower()
        if not takes_text and word in ("true", "false", "none"):  # as Python writes them
            return "null" if word == "none" else word
        return json.dumps(text, ensure_ascii=False)
    fits = types is None or _TYPES.get(type(value), "null") in types
    if fits or not takes_text or (isinstance(value, int | float) and "number" in (types or ())):
        return text.strip()
    return json.dumps(text, ensure_ascii=False)


def _types(schema: Any) -> frozenset[str] | None:
    """The JSON types that a schema allows; None: it does not say."""
    if not isinstance(schema, Mapping):
        return None
    told = schema.get("type")
    if isinstance(told, str):
        return frozenset((told,))
    if isinstance(told, list):
        return frozenset(map(str, told))
    if isinstance(values := schema.get("enum"), list):
        return frozenset(_TYPES.get(type(value), "null") for value in values)
    branches = schema.get("anyOf", schema.get("oneOf"))
    if not isinstance(branches, list) or not branches:
        return None
    found = [_types(branch) for branch in branches]
    return None if None in found else frozenset().union(*(types for types in found if types is not None))


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
