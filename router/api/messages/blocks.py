"""Turns and content blocks as Anthropic's API writes them, and the messages that chat templates know."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from baton_proto.images import Image
from router.api.dialects.image_parts import image_of, with_images
from router.api.dialects.json_body import ABSENT
from router.api.dialects.text_parts import plain_text
from router.api.wishes.cache_hints import CacheControl
from router.api.wishes.names import Name
from router.api.wishes.tools import MAX_CALLS, plain_call
from router.api.wishes.validation import plain_role
from router.text.chat_template import SLOT, Message
from runtime.errors import InvalidRequestError, shown


class TextBlock(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A block of a system prompt or of a tool's result, which has to be a text."""

    type: Name
    text: str | None = None
    cache_control: CacheControl | None = None
    citations: Raw = ABSENT  # of an answer that is sent back; without effect
    source: Raw = ABSENT  # of an image, or of blocks of other types, which are refused as such
    title: Raw = ABSENT
    context: Raw = ABSENT


class Block(TextBlock, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A block of any type."""

    thinking: str | None = None
    id: Name | None = None  # of a tool_use, as are the next two
    name: Name | None = None
    input: Raw = ABSENT
    tool_use_id: Name | None = None  # of a tool_result, as are the next two
    content: str | Sequence[TextBlock] | None = None
    is_error: bool | None = None  # without effect: the content says so
    signature: Raw = ABSENT  # without effect, as are those that follow
    data: Raw = ABSENT
    caller: Raw = ABSENT
    toolset_name: Raw = ABSENT


class Turn(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Name
    content: str | Sequence[Block]


class _Source(Struct, frozen=True):
    """Of an image."""

    type: str
    media_type: str = ""
    data: str = ""
    url: str = ""


class Conversation:
    """Makes messages of turns. A turn of the assistant is one message; results of tools are messages of their own."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.argument_bytes = 0
        self._parts: list[str] = []  # texts of the turn that are no message yet
        self._images: list[Image] = []  # of these
        self._said: dict[str, Any] = {}  # what the turn's message has beside its text

    def add(self, where: str, turn: Turn) -> None:
        """Raises InvalidRequestError."""
        role = plain_role(where, turn.role)
        if isinstance(turn.content, str):
            self.messages.append({"role": role, "content": turn.content})
            return
        known = _OF_ASSISTANT if role == "assistant" else _OF_USER
        for i, block in enumerate(turn.content):
            name = f"{where}.content[{i}]"
            take = known.get(block.type)
            if take is None:
                problem = f"is {shown(block.type)}, must be one of {', '.join(known)} in a turn of this role"
                raise InvalidRequestError(f"{name}.type", problem)
            take(self, name, block)
        if self._parts or self._said or role == "assistant":
            self._end_message(where, role)

    def _end_message(self, where: str, role: str) -> None:
        content = with_images(f"{where}.content", "\n".join(self._parts), self._images)
        self.messages.append({"role": role, **content, **self._said})
        self._parts, self._images, self._said = [], [], {}

    def _text(self, where: str, block: Block) -> None:
        self._parts.append(_required(f"{where}.text", block.text))

    def _image(self, where: str, block: Block) -> None:
        try:
            source = msgspec.json.decode(block.source, type=_Source)
        except msgspec.DecodeError as error:
            raise InvalidRequestError(f"{where}.source", f"is no source of an image: {error}") from error
        url = f"data:{source.media_type};base64,{source.data}" if source.type == "base64" else source.url
        self._images.append(image_of(f"{where}.source", url, len(self._images)))
        self._parts.append(SLOT)

    def _thinking(self, where: str, block: Block) -> None:
        before = self._said.get("reasoning_content", "")
        self._said["reasoning_content"] = before + _required(f"{where}.thinking", block.thinking)

    def _unreadable(self, where: str, block: Block) -> None:
        """Thinking that another service has encrypted."""

    def _tool_use(self, where: str, block: Block) -> None:
        calls = self._said.setdefault("tool_calls", [])
        if len(calls) == MAX_CALLS:
            raise InvalidRequestError(where, f"is one call too many: a turn has {MAX_CALLS} at most")
        call_id, name = _required(f"{where}.id", block.id), _required(f"{where}.name", block.name)
        self.argument_bytes += memoryview(block.input).nbytes
        try:
            arguments = msgspec.json.decode(block.input or b"{}", type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise InvalidRequestError(f"{where}.input", "must be an object") from error
        calls.append(plain_call(call_id, name, arguments))

    def _tool_result(self, where: str, block: Block) -> None:
        call_id = _required(f"{where}.tool_use_id", block.tool_use_id)
        if self._parts:
            self._end_message(where, "user")
        text = blocks_text(f"{where}.content", block.content or "")
        self.messages.append({"role": "tool", "content": text, "tool_call_id": call_id})


_Take = Callable[[Conversation, str, Block], None]
_OF_USER: Mapping[str, _Take] = {
    "text": Conversation._text,
    "image": Conversation._image,
    "tool_result": Conversation._tool_result,
}
_OF_ASSISTANT: Mapping[str, _Take] = {
    "text": Conversation._text,
    "tool_use": Conversation._tool_use,
    "thinking": Conversation._thinking,
    "redacted_thinking": Conversation._unreadable,
}


def blocks_text(where: str, content: str | Sequence[TextBlock]) -> str:
    """Raises InvalidRequestError."""
    return plain_text(where, content, ("text",), "block of type 'text' with a text")


def keeps_s(where: str, content: str | Sequence[TextBlock] | None) -> Iterator[float]:
    """The seconds for which the blocks ask to stay cached. Raises InvalidRequestError."""
    for i, block in enumerate(() if isinstance(content, str | None) else content):
        if block.cache_control is not None:
            yield block.cache_control.keep_s(f"{where}[{i}].cache_control")
        if isinstance(block, Block):
            yield from keeps_s(f"{where}[{i}].content", block.content)


def _required(where: str, value: str | None) -> str:
    if value is None:
        raise InvalidRequestError(where, "is missing")
    return value
