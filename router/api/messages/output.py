"""A message as Anthropic's API writes it, and the events that tell of it as it grows. Shapes as Anthropic documents
them."""

from typing import Any

from msgspec import UNSET, Raw, Struct, UnsetType

NO_INPUT = Raw(b"{}")


class ContentBlock(Struct):
    """A text, thinking, or a call of a tool."""

    type: str
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET  # of thinking; empty: nobody has to check it
    id: str | UnsetType = UNSET  # of a tool_use, as are those that follow
    name: str | UnsetType = UNSET
    input: Any = UNSET  # an object


class ThinkingTokens(Struct, frozen=True):
    thinking_tokens: int


class MessageUsage(Struct, frozen=True, kw_only=True):
    """The tokens of the prompt are the sum of the first three."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int
    max_tokens: int | UnsetType = UNSET  # ours: what fit of the request's max_tokens, where that was less
    output_tokens_details: ThinkingTokens | UnsetType = UNSET


class Message(Struct, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[ContentBlock] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class Delta(Struct, frozen=True):
    """A piece of a content block."""

    type: str
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET


class Stop(Struct, frozen=True):
    stop_reason: str | None
    stop_sequence: str | None


class MessageEvent(Struct, frozen=True, kw_only=True):
    """Any event: what it tells of depends on its type."""

    type: str
    message: Message | UnsetType = UNSET
    index: int | UnsetType = UNSET  # of the content block
    content_block: ContentBlock | UnsetType = UNSET
    delta: Delta | Stop | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET


class MessageError(Struct, frozen=True):
    type: str
    message: str


class MessageErrorAnswer(Struct, frozen=True):
    """The body of a refusal, and the last event of a stream that fails."""

    error: MessageError
    request_id: str | None = None
    type: str = "error"


class TokenCount(Struct, frozen=True):
    input_tokens: int
