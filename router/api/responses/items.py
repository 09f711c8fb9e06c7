"""The items of a conversation as the Responses API writes them, and the messages that chat templates know."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from baton_proto.images import Url
from router.api.dialects.image_parts import with_images, with_slots
from router.api.dialects.text_parts import plain_text, with_refusals
from router.api.responses.tools import INPUT, MAX_WARNED, CalledAs, Warned
from router.api.wishes.names import Name
from router.api.wishes.tools import MAX_CALLS, plain_call, read_arguments
from router.api.wishes.validation import plain_role
from router.text.chat_template import Message
from runtime.errors import InvalidRequestError, shown

_OF_HOSTED_TOOLS = re.compile(r"\w+_call(_output)?|mcp_\w+")  # types of items that tell of tools that others have run
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class Part(Struct, frozen=True, kw_only=True):
    """Has fields of an answer that is sent back, too, which change nothing."""

    type: Name
    text: str | None = None
    refusal: str | None = None  # of a part of that type, which is read as a text
    image_url: Url | None = None  # of an input_image


class Item(Struct, frozen=True, kw_only=True):
    """An item of any type, likewise with more fields. Without a type it is a message."""

    type: Name = "message"
    role: Name | None = None
    content: str | Sequence[Part] | None = None
    call_id: Name | None = None
    name: Name | None = None
    namespace: Name | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | Sequence[Part] | None = None
    summary: Sequence[Part] | None = None


class Conversation:
    """Makes messages of items. Reasoning, text and calls of one turn of the assistant are one message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.argument_chars = 0
        self.warnings: list[Warned] = []
        self._turn: dict[str, Any] | None = None

    def add(self, where: str, item: Item) -> None:
        """Raises InvalidRequestError."""
        take = _KINDS.get(item.type)
        if take is None and _OF_HOSTED_TOOLS.fullmatch(item.type):
            if len(self.warnings) < MAX_WARNED:
                self.warnings.append(Warned(where, f"items of the type {shown(item.type)} are left out of the prompt"))
            return
        if take is None:
            raise InvalidRequestError(f"{where}.type", f"is {shown(item.type)}, must be one of {', '.join(_KINDS)}")
        take(self, where, item)

    def end(self) -> list[Message]:
        self._end_turn()
        return self.messages

    def _end_turn(self) -> None:
        if self._turn is not None:
            self.messages.append(self._turn)
            self._turn = None

    def _assistant(self) -> dict[str, Any]:
        if self._turn is None:
            self._turn = {"role": "assistant", "content": ""}
        return self._turn

    def _message(self, where: str, item: Item) -> None:
        if item.role is None or item.content is None:
            raise InvalidRequestError(f"{where}.{'content' if item.role else 'role'}", "is missing")
        role = plain_role(where, item.role)
        content, images = with_slots(f"{where}.content", role, item.content, _image_url)
        text = parts_text(f"{where}.content", with_refusals(role, content))
        if role != "assistant":
            self._end_turn()
            self.messages.append({"role": role, **with_images(f"{where}.content", text, images)})
            return
        if self._turn is not None and (self._turn["content"] or "tool_calls" in self._turn):
            self._end_turn()
        self._assistant()["content"] = text

    def _call(self, where: str, item: Item) -> None:
        text = item.arguments or ""
        self._add_call(where, item, len(text), read_arguments(f"{where}.arguments", text))

    def _custom_call(self, where: str, item: Item) -> None:
        self._add_call(where, item, len(item.input or ""), {INPUT: item.input or ""})

    def _add_call(self, where: str, item: Item, num_chars: int, arguments: Mapping[str, Any]) -> None:
        if item.call_id is None or item.name is None:
            raise InvalidRequestError(f"{where}.{'name' if item.call_id else 'call_id'}", "is missing")
        self.argument_chars += num_chars
        calls = self._assistant().setdefault("tool_calls", [])
        if len(calls) == MAX_CALLS:
            raise InvalidRequestError(where, f"is one call too many: at most {MAX_CALLS} may follow each other")
        calls.append(plain_call(item.call_id, CalledAs(item.name, namespace=item.namespace).plain, arguments))

    def _output(self, where: str, item: Item) -> None:
        if item.call_id is None or item.output is None:
            raise InvalidRequestError(f"{where}.{'output' if item.call_id else 'call_id'}", "is missing")
        self._end_turn()
        text = parts_text(f"{where}.output", item.output)
        self.messages.append({"role": "tool", "content": text, "tool_call_id": item.call_id})

    def _reasoning(self, where: str, item: Item) -> None:
        """Its summary stands in for reasoning that is not sent back."""
        if self._turn is not None and (self._turn["content"] or "tool_calls" in self._turn):
            self._end_turn()
        text = parts_text(f"{where}.content", item.content or item.summary or "")
        turn = self._assistant()
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text


_KINDS: Mapping[str, Callable[[Conversation, str, Item], None]] = {
    "message": Conversation._message,
    "function_call": Conversation._call,
    "function_call_output": Conversation._output,
    "custom_tool_call": Conversation._custom_call,
    "custom_tool_call_output": Conversation._output,
    "reasoning": Conversation._reasoning,
}


def _image_url(part: Part) -> str | None:
    return part.image_url or "" if part.type == "input_image" else None


def parts_text(where: str, content: str | Sequence[Part]) -> str:
    """Raises InvalidRequestError."""
    return plain_text(where, content, TEXT_PARTS, "part with a text, of type 'input_text' as a rule")
