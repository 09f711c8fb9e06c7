"""Tools as OpenAI's chat API writes them: `tools`, `tool_choice`, and the calls in messages that are sent back."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from router.api.tool_use import ToolUse
from runtime.errors import InvalidRequestError

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 128 * 1024  # as JSON
MAX_CALLS = 128  # of one message
NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class CalledFunction(Struct, frozen=True):
    name: str
    arguments: str = ""  # JSON


class ToolCall(Struct, frozen=True):
    function: CalledFunction
    id: str = ""
    type: str = "function"

    def plain(self, where: str) -> Mapping[str, Any]:
        """As templates know it: with the arguments as an object. Raises InvalidRequestError."""
        try:
            arguments = msgspec.json.decode(self.function.arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise InvalidRequestError(f"{where}.function.arguments", "must be the JSON of an object") from error
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


def plain_calls(where: str, calls: Sequence[ToolCall]) -> list[Mapping[str, Any]]:
    """Raises InvalidRequestError."""
    if len(calls) > MAX_CALLS:
        raise InvalidRequestError(where, f"has {len(calls)} calls; at most {MAX_CALLS} are allowed")
    return [call.plain(f"{where}[{i}]") for i, call in enumerate(calls)]


def tool_use(tools: Raw, choice: Any, parallel: bool | None) -> ToolUse:
    """Raises InvalidRequestError."""
    if (size := memoryview(tools).nbytes) > MAX_TOOLS_BYTES:
        raise InvalidRequestError("tools", f"has {size} bytes; at most {MAX_TOOLS_BYTES} are allowed")
    try:
        given = msgspec.json.decode(tools, type=list[dict[str, Any]] | None) or [] if size else []
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError("tools", f"cannot be used: {error}") from error
    if len(given) > MAX_TOOLS:
        raise InvalidRequestError("tools", f"has {len(given)} tools; at most {MAX_TOOLS} are allowed")
    names = [_checked(f"tools[{i}]", tool) for i, tool in enumerate(given)]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InvalidRequestError(f"tools[{i}].function.name", f"is {name!r}, as that of a tool before it")
    kind, named = _choice(choice, names)
    return ToolUse(given, kind, named, parallel is not False)


def named_choice(name: str) -> Mapping[str, Any]:
    """The choice of one tool, as OpenAI writes it."""
    return {"type": "function", "function": {"name": name}}


def schema_object(where: str, text: str) -> dict[str, Any]:
    """A JSON object that is written down. Raises InvalidRequestError."""
    if len(text) > MAX_TOOLS_BYTES:
        raise InvalidRequestError(where, f"has {len(text)} characters; at most {MAX_TOOLS_BYTES} are allowed")
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError(where, f"must be the JSON of an object: {error}") from error


def _checked(where: str, tool: Mapping[str, Any]) -> str:
    """Returns the name. Raises InvalidRequestError."""
    if tool.get("type") != "function":
        raise InvalidRequestError(f"{where}.type", f"is {tool.get('type')!r:.100}, must be 'function'")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequestError(f"{where}.function", "is missing or not an object")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        problem = f"is {name!r:.100}, must be 1 to 128 letters, digits, or characters of '_.:-'"
        raise InvalidRequestError(f"{where}.function.name", problem)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequestError(f"{where}.function.parameters", "must be a JSON schema, which is an object")
    if parameters and parameters.setdefault("type", "object") != "object":
        raise InvalidRequestError(f"{where}.function.parameters.type", "must be 'object'")
    for key, kind in (("properties", dict), ("required", list)):
        if parameters and not isinstance(parameters.get(key, kind()), kind):
            raise InvalidRequestError(f"{where}.function.parameters.{key}", "has not the form of a JSON schema")
    return name


def _choice(choice: Any, names: Sequence[str]) -> tuple[Any, str | None]:
    """(kind, name of the tool that must be called)"""
    if choice in (None, "none", "auto", "required"):
        if choice == "required" and not names:
            raise InvalidRequestError("tool_choice", "is 'required' and there are no tools")
        return choice or "auto", None
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        form = "'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}"
        raise InvalidRequestError("tool_choice", f"must be {form}")
    if name not in names:
        raise InvalidRequestError("tool_choice.function.name", f"is {name!r:.100}, which is none of tools")
    return "required", name
