"""The tools that a client of the Responses API runs: functions, custom ones (which take a text), both in namespaces.

Templates and parsers know functions alone, so every tool is one to them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from router.api.wishes.tool_use import ToolChoice, ToolUse
from router.api.wishes.tools import (
    MAX_TOOLS,
    allowed_tools,
    check_function,
    check_named,
    check_some,
    plain_tool,
    read_tools,
)
from runtime.errors import InvalidRequestError, shown

MAX_WARNED = 16  # of each kind
INPUT = "input"  # the one argument of a custom tool
_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


class Warned(Struct, frozen=True):
    """A warning of something in a request that has no part in its response."""

    param: str
    message: str
    type: str = "warning"


class CalledAs(Struct, frozen=True):
    """A tool as the items of a conversation name it."""

    name: str
    kind: Literal["function", "custom"] = "function"
    namespace: str | None = None

    @property
    def plain(self) -> str:
        """The name for templates and parsers."""
        return self.name if self.namespace is None else f"{self.namespace}.{self.name}"

    def told(self) -> dict[str, str]:
        """The tool as a choice writes it."""
        told = {"type": self.kind, "name": self.name}
        return told if self.namespace is None else told | {"namespace": self.namespace}


class ClientTools(Struct, frozen=True):
    use: ToolUse
    called_as: Mapping[str, CalledAs]  # by plain name
    warnings: Sequence[Warned]

    def told_choice(self) -> Any:
        """The served part of the choice, which a response repeats."""
        if self.use.named is not None:
            return self.called_as[self.use.named].told()
        if self.use.allowed is not None:
            told = [self.called_as[name].told() for name in self.use.allowed]
            return {"type": "allowed_tools", "mode": self.use.choice, "tools": told}
        return self.use.choice


class _Given(Struct, frozen=True):
    """The tools of a request that are read so far."""

    tools: list[dict[str, Any]] = []  # as templates know them
    called_as: dict[str, CalledAs] = {}
    fields: list[str] = []  # the caller's name of each one's schema
    strict: list[str] = []
    warnings: list[Warned] = []

    def add(self, where: str, tool: Any, namespace: str | None = None) -> None:
        """Raises InvalidRequestError."""
        kind = tool.get("type") if isinstance(tool, dict) else None
        match kind:
            case "function":
                self._add(where, tool, CalledAs(check_function(where, tool), "function", namespace))
            case "custom":
                name = check_function(where, tool)
                about = "\n\n".join(filter(None, (tool.get("description"), _form(tool.get("format")))))
                tool = {"description": about, "parameters": _SCHEMA}
                self._add(where, tool, CalledAs(name, "custom", namespace))
            case "namespace" if namespace is None:
                name, inner = check_function(where, tool), tool.get("tools")
                if not isinstance(inner, list):
                    raise InvalidRequestError(f"{where}.tools", "must be a list of tools")
                for i, each in enumerate(inner):
                    self.add(f"{where}.tools[{i}]", each, name)
            case str():
                problem = f"tools of the type {shown(kind)} are left out: the service runs no tools of its own"
                if len(self.warnings) < MAX_WARNED:
                    self.warnings.append(Warned(where, problem))
            case _:
                raise InvalidRequestError(f"{where}.type", f"is {shown(kind)}, must be 'function'")

    def _add(self, where: str, tool: Mapping[str, Any], called: CalledAs) -> None:
        if called.plain in self.called_as:
            raise InvalidRequestError(f"{where}.name", f"is {shown(called.plain)}, as that of a tool before it")
        if len(self.tools) == MAX_TOOLS:
            raise InvalidRequestError(where, f"is one tool too many: at most {MAX_TOOLS} are allowed")
        self.called_as[called.plain] = called
        self.tools.append(plain_tool(called.plain, tool.get("description"), tool.get("parameters")))
        self.fields.append(f"{where}.parameters")
        if tool.get("strict") is True:
            self.strict.append(called.plain)


def client_tools(tools: Raw, choice: Any, parallel: bool | None) -> ClientTools:
    """Raises InvalidRequestError."""
    given = _Given()
    for i, tool in enumerate(read_tools(tools)):
        given.add(f"tools[{i}]", tool)
    kind, named, allowed = _choice(choice, list(given.called_as), given.warnings)
    use = ToolUse(given.tools, kind, named, parallel is not False, allowed, given.strict, given.fields)
    return ClientTools(use, given.called_as, given.warnings)


def _choice(
    choice: Any, names: Sequence[str], warnings: list[Warned]
) -> tuple[ToolChoice, str | None, Sequence[str] | None]:
    """(kind, name of the tool that must be called, names of those that may be). Raises InvalidRequestError."""
    if choice in (None, "none", "auto", "required"):
        check_some("tool_choice", choice, names)
        return choice or "auto", None, None
    match choice:
        case {"type": "function" | "custom"}:
            return "required", check_named("tool_choice.name", _plain(choice), names), None
        case {"type": "allowed_tools", "tools": list(listed)}:
            served = [tool for tool in listed if not _is_hosted(tool)]
            if len(served) < len(listed):
                warnings.append(Warned("tool_choice.tools", "tools that are not the client's own are left out"))
            told = {**choice, "tools": [{"name": _plain(tool)} for tool in served]}
            kind, allowed = allowed_tools("tool_choice", told, names)
            return kind, None, allowed
        case {"type": "allowed_tools"}:
            raise InvalidRequestError("tool_choice.tools", "must be a list of one tool or more")
    form = "'none', 'auto', 'required', {'type': 'function', 'name': ...} or of type 'allowed_tools'"
    raise InvalidRequestError("tool_choice", f"must be {form}")


def _is_hosted(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type", "function") not in ("function", "custom")


def _plain(tool: Any) -> Any:
    """The name that a choice gives."""
    match tool:
        case {"name": str(name), "namespace": str(namespace)}:
            return CalledAs(name, namespace=namespace).plain
        case {"name": name}:
            return name
    return None


def input_of(arguments: str) -> str:
    """The text that a custom tool gets, of the arguments of its call. What is no such object is the text itself."""
    try:
        given = msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return arguments
    text = given.get(INPUT, next(iter(given.values())) if len(given) == 1 else None)
    return text if isinstance(text, str) else arguments


def _form(given: Any) -> str | None:
    """Tells a model which form a custom tool's text must have."""
    match given:
        case {"type": "grammar", "syntax": str(syntax), "definition": str(definition)}:
            return f"The {INPUT} is a text that matches this grammar, in the form {syntax}:\n{definition}"
    return None
