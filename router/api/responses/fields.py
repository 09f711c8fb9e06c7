"""The body of POST /v1/responses."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Raw, Struct

from baton_proto.grammar import Grammar
from router.api.dialects.extensions import ExtendedBody, with_known
from router.api.dialects.json_body import ABSENT, SHOWN_CHARS, decode_body, served_fields
from router.api.dialects.tolerant import tolerant
from router.api.openai.types import ChatBody, CompletionBody
from router.api.responses.items import Conversation, Item
from router.api.responses.tools import MAX_WARNED, ClientTools, Warned, client_tools
from router.api.wishes.cache_hints import CacheOptions, openai_keeps_s
from router.api.wishes.names import Name
from router.api.wishes.sampling_options import Options
from router.api.wishes.structured_output import schema_grammar
from router.api.wishes.template_variables import thinking_variables, verbosity_variables
from runtime.errors import InvalidRequestError, UnknownFieldError, nearest, shown

LOGPROBS = "message.output_text.logprobs"  # of `include`
MAX_DESCRIPTION_CHARS = 16 * 1024  # of a format, which the response repeats

Key = Annotated[str, Meta(max_length=64)]
Value = Annotated[str, Meta(max_length=512)]


class TextFormat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Name = "text"
    name: Name | None = None  # for the model's eyes, as is the next one
    description: Annotated[str, Meta(max_length=MAX_DESCRIPTION_CHARS)] | None = None
    schema: Any = None
    strict: bool | None = None  # a schema holds either way

    def grammar(self) -> tuple[Grammar, str] | None:
        """The grammar and the name of its field. Raises InvalidRequestError."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return Grammar("json_object"), "text.format"
            case "json_schema":
                return schema_grammar("text.format.schema", self.schema), "text.format.schema"
        known = "text, json_object, json_schema"
        raise InvalidRequestError("text.format.type", f"is {shown(self.type)}, must be one of {known}")


class TextConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Name | None = None  # goes to the chat template


class Reasoning(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    effort: Name | None = None
    summary: Name | None = None  # without effect, as are those that follow: reasoning is told in full
    generate_summary: Name | None = None
    context: Name | None = None
    mode: Name | None = None


NOT_SERVED: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
}
WITHOUT_EFFECT = (
    "user",
    "safety_identifier",
    "service_tier",
    "stream_options",
    "max_tool_calls",
    "access_programs",
    "image",
    "client_metadata",
)
if TYPE_CHECKING:
    _KnownFields = ExtendedBody
else:
    _KnownFields = with_known(ExtendedBody, NOT_SERVED, WITHOUT_EFFECT)


class ResponsesBody(_KnownFields, frozen=True, kw_only=True):
    """POST /v1/responses"""

    inner: ClassVar[Mapping[str, type[Struct]]] = {
        "text": TextConfig,
        "format": TextFormat,
        "reasoning": Reasoning,
        "prompt_cache_options": CacheOptions,
    }
    input: str | Sequence[Item] | None = None
    instructions: str | None = None
    previous_response_id: Name | None = None
    store: bool | None = None
    tools: Raw = ABSENT
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: int | None = None
    include: Sequence[Name] | None = None
    top_logprobs: int | None = None
    truncation: Name | None = None
    metadata: Annotated[dict[Key, Value], Meta(max_length=16)] | None = None
    prompt_cache_retention: Name | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_key: Name | None = None
    stop: str | list[str] | None = None  # as in the chat API

    def keeps_s(self) -> Iterable[float]:
        return openai_keeps_s(self.prompt_cache_retention, self.prompt_cache_key, self.prompt_cache_options)

    def options(self) -> Options:
        """Raises InvalidRequestError."""
        given, names = self.sampled(), {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}
        if self.truncation not in (None, "disabled"):
            raise InvalidRequestError("truncation", f"is {shown(self.truncation)}, must be 'disabled'")
        if self.max_output_tokens is not None:
            given["max_tokens"] = self.max_output_tokens
        if LOGPROBS in (self.include or ()):
            given["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            raise InvalidRequestError("top_logprobs", f"needs {LOGPROBS!r} in include")
        if found := ((self.text or TextConfig()).format or TextFormat()).grammar():
            given["grammar"], names["grammar"] = found
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        return Options(given=given, names=names, stop=stop)

    def turns(self) -> Conversation:
        """The messages of the input, without the instructions. Raises InvalidRequestError."""
        conversation = Conversation()
        if self.input is None:
            raise InvalidRequestError("input", "is missing")
        items = [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for i, item in enumerate(items):
            conversation.add(f"input[{i}]", item)
        conversation.end()
        return conversation

    def template_variables(self) -> dict[str, Any]:
        """Raises InvalidRequestError."""
        verbosity = None if self.text is None else self.text.verbosity
        effort = None if self.reasoning is None else self.reasoning.effort
        return self.variables({**verbosity_variables(verbosity), **thinking_variables(effort)})

    def client_tools(self) -> ClientTools:
        """Raises InvalidRequestError."""
        return client_tools(self.tools, self.tool_choice, self.parallel_tool_calls)


class _TolerantBody(ResponsesBody, frozen=True, kw_only=True, forbid_unknown_fields=False): ...


_OF_OTHER_APIS = frozenset((*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__))


def read_responses_body(data: bytes, is_strict: bool) -> tuple[ResponsesBody, list[Warned]]:
    """The body, and its unknown fields. Clients of this API bring fields of their own, which change no answer. A field
    that another API here knows, or that is like a known one, would change it and is refused, as is an unknown one in
    `text` and `reasoning`. Not strict: no field is looked at. Raises InvalidRequestError."""
    if not is_strict:
        return decode_body(data, tolerant(ResponsesBody)), []
    try:
        return decode_body(data, ResponsesBody), []
    except UnknownFieldError as error:
        if error.near:
            raise
    body = decode_body(data, _TolerantBody)
    unknown = [name for name in msgspec.json.decode(data, type=dict[str, Raw]) if not hasattr(body, name)]
    for name in unknown:
        near = nearest(name, served_fields(ResponsesBody))
        if near or name in _OF_OTHER_APIS:
            raise UnknownFieldError(name[:SHOWN_CHARS], near)
    return body, [Warned(name[:SHOWN_CHARS], "is not known here and is left out") for name in unknown[:MAX_WARNED]]
