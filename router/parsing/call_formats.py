"""How families write tool calls. Each function reads what follows the mark that opens a call or a list of calls."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from router.parsing.events import Arguments, CallBegun, Event
from router.parsing.python_literals import python_literal
from router.parsing.reader import EndedError, MalformedError, Reader, Steps

Schemas = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> the JSON schema of its parameters."""

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class CallWriter:
    """Makes events of the calls of one answer."""

    def __init__(self, emit: Callable[[Event], None], new_id: Callable[[], str], schemas: Schemas) -> None:
        self._emit = emit
        self._new_id = new_id
        self.schemas = schemas
        self.num_calls = 0
        self.is_open = False

    def begin(self, name: str, reader: Reader) -> None:
        """From here on the call stands, whatever follows. Raises MalformedError."""
        if not _NAME.fullmatch(name):
            raise MalformedError
        reader.raw = None
        self.is_open = True
        self._emit(CallBegun(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        self._emit(Arguments(self.num_calls - 1, text))

    def done(self, reader: Reader) -> None:
        self.is_open = False
        reader.raw = []


CallFormat = Callable[[Reader, CallWriter], Steps[None]]


def json_call(reader: Reader, calls: CallWriter) -> Steps[None]:
    """{"name": ..., "arguments" or "parameters": {...}}"""
    held: list[str] = []
    named = False
    yield from reader.literal("{")
    while True:
        yield from reader.spaces()
        key = yield from reader.string()
        yield from reader.spaces()
        yield from reader.literal(":")
        yield from reader.spaces()
        if key == "name":
            calls.begin((yield from reader.string()), reader)
            named = True
            for piece in held:
                calls.arguments(piece)
        elif key in ("arguments", "parameters"):
            if (yield from reader.peek()) != "{":
                raise MalformedError
            yield from reader.value(calls.arguments if named else held.append)
            held.append("")
        else:
            yield from reader.value(lambda text: None)
        yield from reader.spaces()
        if (yield from reader.peek()) == "}":
            reader.take(1)
            break
        yield from reader.literal(",")
    if not named:
        raise MalformedError
    if not held:
        calls.arguments("{}")
    calls.done(reader)


def tagged_json(reader: Reader, calls: CallWriter) -> Steps[None]:
    """Hermes, Qwen3: JSON up to </tool_call>."""
    yield from reader.spaces()
    yield from json_call(reader, calls)
    yield from _closing(reader, "</tool_call>")


def bare_json(reader: Reader, calls: CallWriter) -> Steps[None]:
    """Llama 3: JSON objects with semicolons between them."""
    while True:
        yield from reader.spaces()
        yield from json_call(reader, calls)
        yield from reader.spaces()
        if not (yield from reader.starts_with((";",))):
            return
        reader.take(1)


def mistral(reader: Reader, calls: CallWriter) -> Steps[None]:
    """A JSON list of calls, or NAME[ARGS]{...} or NAME{...}."""
    yield from reader.spaces()
    if (yield from reader.peek()) == "[":
        reader.take(1)
        sign = ","
        while sign == ",":
            yield from reader.spaces()
            yield from json_call(reader, calls)
            yield from reader.spaces()
            yield from reader.peek()
            sign = reader.take(1)
        if sign != "]":
            raise MalformedError
        return
    name = yield from _until_sign(reader, "[{")
    if (yield from reader.starts_with(("[",))):
        yield from reader.literal("[ARGS]")
    calls.begin(name.strip(), reader)
    yield from reader.spaces()
    yield from _object(reader, calls)
    calls.done(reader)


def deepseek(reader: Reader, calls: CallWriter) -> Steps[None]:
    """V3 and R1: function, separator, NAME, fenced JSON; V3.1: NAME, separator, JSON."""
    while True:
        yield from reader.spaces()
        end = yield from reader.starts_with(("<｜tool▁calls▁end｜>",))
        if end:
            reader.take(len(end))
            return
        yield from reader.literal("<｜tool▁call▁begin｜>")
        name = yield from _until_sign(reader, "<")
        yield from reader.literal("<｜tool▁sep｜>")
        fenced = name == "function" and bool((yield from reader.peek()) not in "{")
        if fenced:
            name = yield from _until_sign(reader, "\n")
            yield from reader.spaces()
            yield from reader.literal("```json")
        calls.begin(name.strip(), reader)
        yield from reader.spaces()
        yield from _object(reader, calls)
        calls.done(reader)
        yield from reader.spaces()
        yield from _closing(reader, "```" if fenced else "")
        yield from _closing(reader, "<｜tool▁call▁end｜>")


def harmony(reader: Reader, calls: CallWriter) -> Steps[None]:
    """NAME, a channel or a constraint or both, <|message|>, JSON."""
    recipient = yield from reader.starts_with((" to=functions.",))
    reader.take(len(recipient))
    name = yield from _until_sign(reader, " <")
    if (yield from reader.until(("<|message|>",), lambda header: None)) is None:
        raise EndedError
    calls.begin(name, reader)
    yield from reader.spaces()
    yield from _object(reader, calls)
    calls.done(reader)
    yield from _closing(reader, "<|call|>")


def qwen_coder(reader: Reader, calls: CallWriter) -> Steps[None]:
    """<function=NAME><parameter=KEY>value</parameter>...</function></tool_call>; the tool's schema says which values
    are text."""
    yield from reader.spaces()
    yield from reader.literal("<function=")
    name = yield from _until_sign(reader, ">")
    reader.take(1)
    calls.begin(name, reader)
    properties = calls.schemas.get(name, {}).get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    before = "{"
    while True:
        yield from reader.spaces()
        if (yield from reader.starts_with(("</function>",))):
            break
        yield from reader.literal("<parameter=")
        key = yield from _until_sign(reader, ">")
        reader.take(1)
        calls.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        before = ", "
        yield from _xml_value(reader, calls, properties.get(key))
    calls.arguments("{}" if before == "{" else "}")
    yield from reader.literal("</function>")
    calls.done(reader)
    yield from _closing(reader, "</tool_call>")


def _xml_value(reader: Reader, calls: CallWriter, schema: Any) -> Steps[None]:
    """Text streams; any other value is known to be JSON at its end only. A line break around the value is no part."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if (yield from reader.starts_with(("\n",))):
        reader.take(1)
    ends = ("\n</parameter>", "</parameter>")
    if kind == "string":
        calls.arguments('"')
        if (yield from reader.until(ends, lambda text: calls.arguments(_escaped(text)))) is None:
            raise EndedError
        calls.arguments('"')
        return
    parts: list[str] = []
    if (yield from reader.until(ends, parts.append)) is None:
        raise EndedError
    text = "".join(parts)
    try:
        json.loads(text)
        calls.arguments(text.strip())
    except ValueError:
        calls.arguments(json.dumps(text, ensure_ascii=False))


def pythonic(reader: Reader, calls: CallWriter) -> Steps[None]:
    """[name(key=value, ...), ...] with Python's literals."""
    yield from reader.literal("[")
    while True:
        yield from reader.spaces()
        name = yield from _until_sign(reader, "(")
        reader.take(1)
        calls.begin(name, reader)
        before = "{"
        while True:
            yield from reader.spaces()
            if (yield from reader.peek()) == ")":
                break
            if before != "{":
                yield from reader.literal(",")
                yield from reader.spaces()
            key = (yield from _until_sign(reader, "=")).strip()
            reader.take(1)
            calls.arguments(f"{before}{json.dumps(key)}: ")
            yield from python_literal(reader, calls.arguments)
            if (yield from reader.peek()) not in ",)":
                raise MalformedError
            before = ", "
        reader.take(1)
        calls.arguments("{}" if before == "{" else "}")
        calls.done(reader)
        yield from reader.spaces()
        yield from reader.peek()
        match reader.take(1):
            case "]":
                return
            case ",":
                continue
        raise MalformedError


def _object(reader: Reader, calls: CallWriter) -> Steps[None]:
    if (yield from reader.peek()) != "{":
        raise MalformedError
    yield from reader.value(calls.arguments)


def _until_sign(reader: Reader, signs: str) -> Steps[str]:
    """A name, up to one of `signs`, which stays."""
    name: list[str] = []
    while (sign := (yield from reader.peek())) not in signs:
        if len(name) >= 256:
            raise MalformedError
        name.append(reader.take(len(sign)))
    return "".join(name)


def _closing(reader: Reader, mark: str) -> Steps[None]:
    """Takes the mark that closes a call, which is complete without it."""
    yield from reader.spaces()
    if (yield from reader.starts_with((mark,))):
        reader.take(len(mark))


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
