"""Tools as OpenAI's chat API writes them: `tools`, `tool_choice`, and the calls in messages that are sent back."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from router.api.wishes.json_shape import check_depth
from router.api.wishes.names import Name
from router.api.wishes.tool_use import NO_PARAMETERS, ToolChoice, ToolUse
from router.api.wishes.validation import IN_PLACE_BYTES, NAME_COST
from runtime.errors import InvalidRequestError, shown

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 128 * 1024  # as JSON
MAX_CALLS = 128  # of one message
MAX_ARGUMENT_VALUES = 64 * 1024  # of one call; reading and rendering them takes 160 ns each, in which no thread runs
NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class CalledFunction(Struct, frozen=True):
    name: Name
    arguments: str = ""  # JSON


class ToolCall(Struct, frozen=True):
    function: CalledFunction
    id: Name = ""
    type: Name = "function"

    def plain(self, where: str) -> Mapping[str, Any]:
        """The call as templates know it, with the arguments as an object. Raises InvalidRequestError."""
        arguments = read_arguments(f"{where}.function.arguments", self.function.arguments)
        return plain_call(self.id, self.function.name, arguments)


def plain_call(call_id: str, name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """A call as templates know it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def read_arguments(where: str, text: str) -> dict[str, Any]:
    """Raises InvalidRequestError. Signs within texts are counted as values, too."""
    if len(text) > IN_PLACE_BYTES and sum(map(text.count, ",[{")) + NAME_COST * text.count(":") > MAX_ARGUMENT_VALUES:
        raise InvalidRequestError(
            where, f"have more than {MAX_ARGUMENT_VALUES} values (a named one counts {NAME_COST})"
        )
    check_depth(where, text)
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidRequestError(where, "must be the JSON of an object") from error


def plain_calls(where: str, calls: Sequence[ToolCall]) -> list[Mapping[str, Any]]:
    """Raises InvalidRequestError."""
    if len(calls) > MAX_CALLS:
        raise InvalidRequestError(where, f"has {len(calls)} calls; at most {MAX_CALLS} are allowed")
    return [call.plain(f"{where}[{i}]") for i, call in enumerate(calls)]


def tool_use(
    tools: Raw, choice: Any, parallel: bool | None, schema_field: str = "tools[{}].function.parameters"
) -> ToolUse:
    """`schema_field`: the caller's name of a tool's schema, with {} for the tool's number. Raises
    InvalidRequestError."""
    given = read_tools(tools)
    function = schema_field.rpartition(".")[0]
    names = [_checked(f"tools[{i}]", function.format(i), tool) for i, tool in enumerate(given)]
    check_distinct(f"{function}.name", names)
    strict = [name for name, tool in zip(names, given, strict=True) if tool["function"].get("strict") is True]
    kind, named, allowed = _choice(choice, names)
    return ToolUse(
        given, kind, named, parallel is not False, allowed, strict, [schema_field.format(i) for i in range(len(given))]
    )


def read_tools(tools: Raw) -> list[dict[str, Any]]:
    """Decodes the `tools` of any dialect. Raises InvalidRequestError."""
    if (size := memoryview(tools).nbytes) > MAX_TOOLS_BYTES:
        raise InvalidRequestError("tools", f"has {size} bytes; at most {MAX_TOOLS_BYTES} are allowed")
    try:
        given = msgspec.json.decode(tools, type=list[dict[str, Any]] | None) or [] if size else []
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError("tools", f"cannot be used: {error}") from error
    if len(given) > MAX_TOOLS:
        raise InvalidRequestError("tools", f"has {len(given)} tools; at most {MAX_TOOLS} are allowed")
    return given


def named_choice(name: str) -> Mapping[str, Any]:
    """The choice of one tool, as OpenAI writes it."""
    return {"type": "function", "function": {"name": name}}


def allowed_choice(mode: str, names: Iterable[str]) -> Mapping[str, Any]:
    """The choice of some tools, likewise."""
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [{"name": name} for name in names]}}


def schema_object(where: str, text: str) -> dict[str, Any]:
    """A JSON object that is written down. Raises InvalidRequestError."""
    if len(text) > MAX_TOOLS_BYTES:
        raise InvalidRequestError(where, f"has {len(text)} characters; at most {MAX_TOOLS_BYTES} are allowed")
    check_depth(where, text)
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise InvalidRequestError(where, f"must be the JSON of an object: {error}") from error


def _checked(where: str, function_field: str, tool: Mapping[str, Any]) -> str:
    """Returns the name. Raises InvalidRequestError."""
    if tool.get("type") != "function":
        raise InvalidRequestError(f"{where}.type", f"is {shown(tool.get('type'))}, must be 'function'")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequestError(function_field, "is missing or not an object")
    return check_function(function_field, function)


def check_function(where: str, function: Mapping[str, Any], schema: str = "parameters") -> str:
    """Returns the name. `schema`: the protocol's name of what describes the arguments. Raises InvalidRequestError."""
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        problem = f"is {shown(name)}, must be 1 to 128 letters, digits, or characters of '_.:-'"
        raise InvalidRequestError(f"{where}.name", problem)
    parameters = function.get(schema)
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequestError(f"{where}.{schema}", "must be a JSON schema, which is an object")
    if parameters and parameters.setdefault("type", "object") != "object":
        raise InvalidRequestError(f"{where}.{schema}.type", "must be 'object'")
    for key, kind in (("properties", dict), ("required", list)):
        if parameters and not isinstance(parameters.get(key, kind()), kind):
            raise InvalidRequestError(f"{where}.{schema}.{key}", "has not the form of a JSON schema")
    return name


def check_distinct(where: str, names: Sequence[str]) -> None:
    """`where`: the field of a tool's name, with {} for the tool's number. Raises InvalidRequestError."""
    known: set[str] = set()
    for i, name in enumerate(names):
        if name in known:
            raise InvalidRequestError(where.format(i), f"is {name!r}, as that of a tool before it")
        known.add(name)


def plain_tool(name: str, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool as OpenAI's chat API and templates write it."""
    told = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **told, "parameters": parameters or NO_PARAMETERS}}


def check_named(where: str, name: Any, names: Sequence[str]) -> str:
    """The name of a tool that a request gives. Raises InvalidRequestError."""
    if name not in names:
        raise InvalidRequestError(where, f"is {shown(name)}, which is none of tools")
    return str(name)


def _choice(choice: Any, names: Sequence[str]) -> tuple[ToolChoice, str | None, Sequence[str] | None]:
    """(kind, name of the tool that must be called, names of those that may be)"""
    if choice in (None, "none", "auto", "required"):
        check_some("tool_choice", choice, names)
        return choice or "auto", None, None
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        kind, allowed = allowed_tools("tool_choice.allowed_tools", choice.get("allowed_tools"), names)
        return kind, None, allowed
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        form = "'none', 'auto', 'required', {'type': 'function', 'function': {'name': ...}} or of type 'allowed_tools'"
        raise InvalidRequestError("tool_choice", f"must be {form}")
    return "required", check_named("tool_choice.function.name", name, names), None


def check_some(where: str, choice: Any, names: Sequence[str]) -> None:
    """Raises InvalidRequestError."""
    if choice == "required" and not names:
        raise InvalidRequestError(where, "is 'required' and there are no tools")


def allowed_tools(where: str, given: Any, names: Sequence[str]) -> tuple[ToolChoice, Sequence[str]]:
    """(kind, names), of OpenAI's {"mode": ..., "tools": [...]}. Raises InvalidRequestError."""
    mode = given.get("mode") if isinstance(given, dict) else None
    if mode not in ("auto", "required"):
        raise InvalidRequestError(f"{where}.mode", f"is {shown(mode)}, must be 'auto' or 'required'")
    tools = given.get("tools")
    if not isinstance(tools, list) or not tools:
        raise InvalidRequestError(f"{where}.tools", "must be a list of one tool or more")
    allowed = []
    for i, tool in enumerate(tools):
        told = tool.get("function", tool) if isinstance(tool, dict) else None
        name = told.get("name") if isinstance(told, dict) else None
        allowed.append(check_named(f"{where}.tools[{i}]", name, names))
    return mode, allowed
