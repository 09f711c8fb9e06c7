"""A response as the Responses API writes it, and the events that tell of it as it grows. Shapes as OpenAI documents
them."""

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from router.api.openai.answers import CompletionTokensDetails, PromptTokensDetails
from router.api.openai.chat import TokenLogprob
from router.api.responses.tools import Warned


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str = ""


class OutputItem(Struct):
    """A message, reasoning, or a call of a function or a custom tool."""

    type: str
    id: str
    status: str | None = "in_progress"
    role: str | UnsetType = UNSET  # of a message
    summary: list[Any] | UnsetType = UNSET  # of reasoning
    content: list[OutputText | ReasoningText] | UnsetType = UNSET  # of both; one part as soon as it has begun
    call_id: str | UnsetType = UNSET  # of a call, as are those that follow
    name: str | UnsetType = UNSET
    namespace: str | UnsetType = UNSET  # where the caller's tool is in one
    arguments: str | UnsetType = UNSET  # of a function
    input: str | UnsetType = UNSET  # of a custom tool


class InputTokensDetails(PromptTokensDetails, frozen=True):
    cache_write_tokens: int = 0


class ResponseUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class ResponseError(Struct, frozen=True):
    code: str
    message: str


class Incomplete(Struct, frozen=True):
    reason: str


class Response(Struct, kw_only=True):
    """The request repeated, and the answer so far."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str = "in_progress"
    model: str
    output: list[OutputItem] = []
    error: ResponseError | None = None
    incomplete_details: Incomplete | None = None
    usage: ResponseUsage | None = None
    instructions: str | None
    previous_response_id: str | None
    store: bool
    background: bool = False
    temperature: float
    top_p: float
    max_output_tokens: int | None
    tools: Any  # as the caller wrote them
    tool_choice: Any
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]
    truncation: str = "disabled"
    metadata: dict[str, str]
    warnings: list[Warned] | UnsetType = UNSET  # ours


class Event(Struct, frozen=True):
    type: str
    sequence_number: int


class ResponseEvent(Event, frozen=True):
    response: Response


class ItemEvent(Event, frozen=True):
    output_index: int
    item: OutputItem


class PartEvent(Event, frozen=True):
    output_index: int
    item_id: str
    content_index: int
    part: OutputText | ReasoningText


class TextEvent(Event, frozen=True):
    """A piece of a text, or the whole of it at its end."""

    output_index: int
    item_id: str
    content_index: int
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class CallEvent(Event, frozen=True):
    """A piece of a call's arguments, or the whole of them at their end; the text for a custom tool comes in one
    piece."""

    output_index: int
    item_id: str
    delta: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET  # of a custom tool


class InputTokens(Struct, frozen=True):
    input_tokens: int
    object: str = "response.input_tokens"
