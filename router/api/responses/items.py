"""The items of a conversation as the Responses API writes them, and the messages that chat templates know."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Raw, Struct

from router.api.http.openai_fields import ABSENT, plain_text, with_refusals
from router.api.names import Name
from router.api.openai_tools import MAX_CALLS, plain_call, read_arguments
from router.api.validation import plain_role
from router.text.chat_template import Message
from runtime.errors import InvalidRequestError, shown

TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Name
    text: str | None = None
    annotations: Raw = ABSENT  # of an answer that is sent back; without effect, as are the next two
    logprobs: Raw = ABSENT
    prompt_cache_breakpoint: Raw = ABSENT
    refusal: str | None = None  # of a part of that type, which is read as a text
    image_url: Raw = ABSENT  # of parts of other types, which are refused as such, as are the next ones
    file_id: Raw = ABSENT
    file_data: Raw = ABSENT
    file_url: Raw = ABSENT
    filename: Raw = ABSENT
    detail: Raw = ABSENT


class Item(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An item of any type. Without a type it is a message."""

    type: Name = "message"
    role: Name | None = None
    content: str | Sequence[Part] | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: str | None = None
    output: str | Sequence[Part] | None = None
    summary: Sequence[Part] | None = None
    id: Name | None = None  # without effect, as are those that follow: they belong to an answer that is sent back
    status: Name | None = None
    phase: Raw = ABSENT
    caller: Raw = ABSENT
    namespace: Raw = ABSENT
    encrypted_content: Raw = ABSENT  # ours is never encrypted


class Conversation:
    """Makes messages of items. Reasoning, text and calls of one turn of the assistant are one message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.argument_chars = 0
        self._turn: dict[str, Any] | None = None

    def add(self, where: str, item: Item) -> None:
        """Raises InvalidRequestError."""
        take = _KINDS.get(item.type)
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
        text = parts_text(f"{where}.content", with_refusals(role, item.content))
        if role != "assistant":
            self._end_turn()
            self.messages.append({"role": role, "content": text})
            return
        if self._turn is not None and (self._turn["content"] or "tool_calls" in self._turn):
            self._end_turn()
        self._assistant()["content"] = text

    def _call(self, where: str, item: Item) -> None:
        if item.call_id is None or item.name is None:
            raise InvalidRequestError(f"{where}.{'name' if item.call_id else 'call_id'}", "is missing")
        text = item.arguments or ""
        self.argument_chars += len(text)
        calls = self._assistant().setdefault("tool_calls", [])
        if len(calls) == MAX_CALLS:
            raise InvalidRequestError(where, f"is one call too many: at most {MAX_CALLS} may follow each other")
        calls.append(plain_call(item.call_id, item.name, read_arguments(f"{where}.arguments", text)))

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
    "reasoning": Conversation._reasoning,
}


def parts_text(where: str, content: str | Sequence[Part]) -> str:
    """Raises InvalidRequestError."""
    return plain_text(where, content, TEXT_PARTS, "part with a text, of type 'input_text' as a rule")
