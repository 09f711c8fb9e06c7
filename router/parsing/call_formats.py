"""The formats in which families write tool calls. Each function reads what follows the mark that opens a call or a list
of calls."""

from router.parsing.call_writer import CallWriter, is_json_object
from router.parsing.python_literals import python_literal
from router.parsing.reader import Emit, EndedError, MalformedError, Reader, Steps

_BARE_KEYS = ("name", "type", "id", "function", "parameters", "arguments")
"""Keys of an object that is a call. An object with another key is text from there on."""


def json_call(reader: Reader, calls: CallWriter, keys: tuple[str, ...] = ()) -> Steps[None]:
    """{"name": ..., "arguments" or "parameters": {...}}. `keys`: those that may stand before the name; empty: any."""
    held: list[str] = []
    named = told = False
    yield from reader.literal("{")
    while True:
        yield from reader.spaces()
        key = yield from reader.string()
        yield from reader.spaces()
        yield from reader.literal(":")
        yield from reader.spaces()
        if keys and not named and key not in keys:
            raise MalformedError
        if key == "name" and not named:
            name, named = (yield from reader.string()), True
            if told or not keys:
                calls.begin(name)
            for piece in held:
                calls.arguments(piece)
        elif key in ("arguments", "parameters") and not told:
            if named and keys:
                calls.begin(name)
            told = True
            yield from _arguments(reader, calls.arguments if named else held.append)
        else:
            yield from reader.value(lambda text: None)
        yield from reader.spaces()
        if (sign := (yield from reader.peek())) == "}":
            reader.take(1)
            break
        if sign != "," and named and told:  # the last bracket is forgotten
            break
        yield from reader.literal(",")
    if not named or (keys and not told):  # a bare object is a call by its arguments alone
        raise MalformedError
    if not told:
        calls.arguments("{}")
    calls.done(reader)


def _arguments(reader: Reader, emit: Emit) -> Steps[None]:
    """An object, or one that is written in a string, or null."""
    match (yield from reader.peek()):
        case "{":
            yield from reader.value(emit)
        case '"':
            text = yield from reader.string()
            if not is_json_object(text):
                raise MalformedError
            emit(text)
        case "n":
            yield from reader.literal("null")
            emit("{}")
        case _:
            raise MalformedError


def tagged_json(reader: Reader, calls: CallWriter) -> Steps[None]:
    """Hermes, Qwen3: JSON up to </tool_call>."""
    yield from reader.spaces()
    yield from json_call(reader, calls)
    yield from reader.closing("</tool_call>")


def bare_json(reader: Reader, calls: CallWriter) -> Steps[None]:
    """Llama 3: JSON objects with semicolons between them."""
    while True:
        yield from reader.spaces()
        yield from json_call(reader, calls, _BARE_KEYS)
        yield from reader.spaces()
        if not (yield from reader.starts_with((";",))):
            return
        reader.take(1)


def mistral(reader: Reader, calls: CallWriter) -> Steps[None]:
    """A JSON list of calls, or NAME[CALL_ID]ID[ARGS]{...}, NAME[ARGS]{...} or NAME{...}."""
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
    name = yield from reader.until_sign("[{")
    if (yield from reader.starts_with(("[CALL_ID]",))):
        reader.take(len("[CALL_ID]"))
        yield from reader.until_sign("[")
    if (yield from reader.starts_with(("[",))):
        yield from reader.literal("[ARGS]")
    calls.begin(name.strip())
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
        name = yield from reader.until_sign("<")
        yield from reader.literal("<｜tool▁sep｜>")
        fenced = name == "function" and bool((yield from reader.peek()) not in "{")
        if fenced:
            name = yield from reader.until_sign("\n")
            yield from reader.spaces()
            yield from reader.literal("```json")
        calls.begin(name.strip())
        yield from reader.spaces()
        yield from _object(reader, calls)
        calls.done(reader)
        yield from reader.spaces()
        yield from reader.closing("```" if fenced else "")
        yield from reader.closing("<｜tool▁call▁end｜>")


def harmony(reader: Reader, calls: CallWriter) -> Steps[None]:
    """NAME, a channel or a constraint or both, <|message|>, JSON."""
    yield from reader.spaces()
    recipient = yield from reader.starts_with(("to=functions.",))
    reader.take(len(recipient))
    name = yield from reader.until_sign(" <")
    if (yield from reader.until(("<|message|>",), lambda header: None)) is None:
        raise EndedError
    calls.begin(name)
    yield from reader.spaces()
    yield from _object(reader, calls)
    calls.done(reader)
    yield from reader.closing("<|call|>")


def pythonic(reader: Reader, calls: CallWriter) -> Steps[None]:
    """[name(key=value, ...), ...] with Python's literals."""
    yield from reader.spaces()
    yield from reader.literal("[")
    while True:
        yield from reader.spaces()
        name = yield from reader.until_sign("(")
        reader.take(1)
        calls.begin(name)
        before = "{"
        while True:
            yield from reader.spaces()
            if (yield from reader.peek()) == ")":
                break
            if before != "{":
                yield from reader.literal(",")
                yield from reader.spaces()
            key = (yield from reader.until_sign("=")).strip()
            reader.take(1)
            calls.arguments(f'{before}"{_checked(key)}": ')
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
                return (yield from reader.closing("<|python_end|>"))
            case ",":
                continue
        raise MalformedError


def _object(reader: Reader, calls: CallWriter) -> Steps[None]:
    if (yield from reader.peek()) != "{":
        raise MalformedError
    yield from reader.value(calls.arguments)


def _checked(key: str) -> str:
    """Raises MalformedError when it is no name in Python."""
    if not key.isidentifier():
        raise MalformedError
    return key
