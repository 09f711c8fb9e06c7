"""The messages of a chat and what it says of tools, from Python's own types."""

from collections.abc import Callable, Mapping, Sequence
from json import dumps
from typing import Any

from baton_proto.generated import inference_pb2 as pb
from runtime.errors import InvalidRequestError, shown

Message = Mapping[str, Any]
"""{"role": ..., "content": ...}. Of the assistant also "reasoning" and "tool_calls", as `Choice.message` writes them;
a tool's result is {"role": "tool", "tool_call_id": ..., "content": ...}."""
Tool = Mapping[str, Any]
"""{"name": ..., "description": ..., "parameters": JSON schema of an object, "strict": ...}, or the same as OpenAI's
"function"."""

CHAT_FIELDS = [field.name for field in pb.ChatMessages.DESCRIPTOR.fields if field.name != "messages"]


def chat_messages(messages: Sequence[Message], options: Mapping[str, Any]) -> pb.ChatMessages:
    """`options`: those of CHAT_FIELDS. Raises InvalidRequestError, which names the field."""
    chat = pb.ChatMessages(messages=[_message(f"messages[{at}]", message) for at, message in enumerate(messages)])
    for name, value in options.items():
        set_field(chat, name, _WRITTEN.get(name, _same)(value))
    return chat


def set_field(message: Any, name: str, value: Any, path: str = "") -> None:
    """Sets a field of any kind. Raises InvalidRequestError when `value` is not of its type."""
    try:
        message.MergeFrom(type(message)(**{name: value}))
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(path or name, f"cannot be {shown(value)}: {error}") from error


def _message(path: str, message: Message) -> pb.ChatMessage:
    given = {name: value for name, value in message.items() if value is not None}
    filled: pb.ChatMessage = _filled(pb.ChatMessage(), path, given)
    return filled


def _tools(tools: Sequence[Tool]) -> list[pb.Tool]:
    return [
        _filled(pb.Tool(), f"tools[{at}]", tool.get("function", tool) if isinstance(tool, Mapping) else tool)
        for at, tool in enumerate(tools)
    ]


def _filled(message: Any, path: str, given: Any) -> Any:
    """The message with the fields that a mapping gives."""
    if not isinstance(given, Mapping):
        raise InvalidRequestError(path, f"must be a mapping, not {type(given).__name__}")
    known = [field.name for field in message.DESCRIPTOR.fields]
    for name, value in given.items():
        if name not in known:
            raise InvalidRequestError(path, f"{name!r} is not known here; known are {', '.join(known)}")
        if name == "tool_calls":
            calls = enumerate(value)
            value = [_filled(pb.ToolCall(), f"{path}.tool_calls[{at}]", _call(call)) for at, call in calls]
        elif name in ("parameters", "arguments"):
            value = _json(value)
        set_field(message, name, value, f"{path}.{name}")
    return message


def _call(call: Any) -> Any:
    """Accepts our form of a call and OpenAI's."""
    if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
        return {"id": call.get("id", ""), **call["function"]}
    return call


def _choice(choice: str) -> Any:
    names = {name.removeprefix("TOOL_CHOICE_").lower(): value for name, value in pb.ToolChoice.items()}
    if choice not in names:
        raise InvalidRequestError("tool_choice", f"{choice!r} is none of {', '.join(names)}; named_tool names a tool")
    return names[choice]


def _json(value: Any) -> Any:
    return dumps(value, ensure_ascii=False) if isinstance(value, Mapping) else value


def _same(value: Any) -> Any:
    return value


_WRITTEN: Mapping[str, Callable[[Any], Any]] = {
    "tools": _tools,
    "tool_choice": _choice,
    "template_variables": _json,
}
