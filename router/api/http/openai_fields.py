"""The fields that OpenAI's HTTP API and its extensions name: served, taken without effect, or not served.

Fields without effect are not even decoded. A field that is not served is refused unless it has the value that changes
nothing. Every other name is unknown.
"""

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from baton_proto.sampling import PARAMETERS
from router.api.names import Name
from router.api.openai_tools import ToolCall, plain_calls
from router.api.structured_output import STRUCTURED
from router.api.validation import plain_role
from router.text.chat_template import Message
from runtime.errors import InvalidRequestError, shown

ABSENT = Raw(b"")

WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "parallel_tool_calls")

RETENTIONS_S: Mapping[str | None, float] = {None: 0.0, "in_memory": 0.0, "in-memory": 0.0, "24h": 86400.0}
"""OpenAI's prompt_cache_retention -> for how long the prompt shall stay cached."""

SESSION_KEEP_S = 300.0
"""For how long a prompt with a `prompt_cache_key` shall stay cached: its session is likely to go on from it."""

TTLS_S: Mapping[str | None, float] = {None: 300.0, "5m": 300.0, "1h": 3600.0}
"""Anthropic's `ttl` of a cache_control -> the same."""

CACHE_TTLS_S: Mapping[str | None, float] = {None: 0.0, "30m": 1800.0, "12h": 43200.0}
"""OpenAI's `ttl` of prompt_cache_options -> the same."""

NOT_SERVED: Mapping[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Fields that are known and not served -> the values that change nothing, besides null."""

NOT_SERVED_IN_MESSAGES = ("function_call", "refusal", "audio")
"""Fields of a message that are known and not served, unless they are empty."""

AS_NAMED = [name for name in PARAMETERS if name != "grammar"]
"""The sampling parameters whose name over HTTP is that of the row; a grammar has several."""

if TYPE_CHECKING:

    class NamedFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """As msgspec defines it below: one field for each sampling parameter and for each name above. A field that is
        absent or null is None."""

        max_tokens: int | None = None
        logprobs: Any = None
        prompt_logprobs: int | None = None

else:
    _NAMED = [(name, PARAMETERS[name].type | None, None) for name in AS_NAMED]
    _NAMED += [(name, Any, None) for name in (*STRUCTURED, *NOT_SERVED)]
    _NAMED += [(name, Raw, ABSENT) for name in WITHOUT_EFFECT]
    NamedFields = msgspec.defstruct("NamedFields", _NAMED, frozen=True, kw_only=True, forbid_unknown_fields=True)


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # without effect: our events have no padding
    continuous_usage_stats: bool | None = (
        None  # vLLM's: with include_usage, each chunk tells how far its choice has come
    )


class CacheOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: Name | None = None  # hints are for whole prompts in either mode
    ttl: Name | None = None

    def keep_s(self) -> float:
        """Raises InvalidRequestError."""
        return retention_s("prompt_cache_options.ttl", self.ttl, CACHE_TTLS_S)


class CacheControl(Struct, frozen=True, kw_only=True):
    """Anthropic's mark: the prompt up to here shall stay cached. Our hints are for whole prompts. What agents say in it
    beside, such as `scope`, is about whom the cache serves, which a cache_salt says here; it has no effect."""

    type: Name = "ephemeral"
    ttl: Name | None = None


class TextPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Name
    text: str | None = None
    refusal: str | None = None  # of a part of that type, which is read as a text
    cache_control: CacheControl | None = None
    image_url: Raw = ABSENT  # of parts of other types, which are refused as such
    input_audio: Raw = ABSENT
    file: Raw = ABSENT


class ChatMessage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Name
    content: str | Sequence[TextPart] | None = None
    name: Name | None = None
    tool_calls: Sequence[ToolCall] | None = None
    tool_call_id: Name | None = None
    function_call: Any = None
    refusal: Any = None
    audio: Any = None
    annotations: Raw = ABSENT  # of an answer that is sent back, as is the next one; without effect
    parsed: Raw = ABSENT  # by OpenAI's client, which leaves it in its messages
    provider_specific_fields: Raw = ABSENT  # that LiteLLM leaves in messages, as the next one; without effect
    thinking_blocks: Raw = ABSENT
    reasoning: str | None = None
    reasoning_content: str | None = None

    def keep_s(self, where: str) -> float:
        """For how long its parts ask to stay cached. Raises InvalidRequestError."""
        if isinstance(self.content, str | None):
            return 0.0
        marks = [(i, part.cache_control) for i, part in enumerate(self.content) if part.cache_control is not None]
        name = f"{where}.content[{{}}].cache_control.ttl"
        return max((retention_s(name.format(i), mark.ttl, TTLS_S) for i, mark in marks), default=0.0)

    def plain(self, where: str) -> Message:
        """The message as templates know it. Raises InvalidRequestError."""
        role = plain_role(where, self.role)
        if self.function_call or self.refusal or self.audio:
            name = next(name for name in NOT_SERVED_IN_MESSAGES if getattr(self, name))
            raise InvalidRequestError(f"{where}.{name}", "is not supported; leave it out")
        no_content = self.content is None and self.tool_calls
        content = "" if no_content else _message_text(f"{where}.content", role, self.content)
        plain: dict[str, Any] = {"role": role, "content": content}
        if self.name is not None:
            plain["name"] = self.name
        if self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            plain["tool_calls"] = plain_calls(f"{where}.tool_calls", self.tool_calls)
        if reasoning := self.reasoning_content or self.reasoning:
            plain["reasoning_content"] = reasoning
        return plain


def retention_s(where: str, name: str | None, known: Mapping[str | None, float]) -> float:
    """Raises InvalidRequestError."""
    if name not in known:
        raise InvalidRequestError(where, f"is {shown(name)}, must be one of {', '.join(filter(None, known))}")
    return known[name]


def session_keep_s(key: str | None) -> float:
    """Of a prompt_cache_key. Prefixes themselves say which requests belong together, so its value is not read."""
    return SESSION_KEEP_S if key else 0.0


def longest_keep_s(keep_cache_s: float | None, *others: float) -> float:
    """For how long the prompt shall stay cached; `others`: as other fields ask for it. A `keep_cache_s` that is below
    0, or NaN, goes before them, for `validate` to refuse."""
    own_s = keep_cache_s or 0.0
    return max((own_s, *others)) if own_s >= 0 else own_s


class TextPiece(Protocol):
    """A part of a content in any of the protocols."""

    @property
    def type(self) -> str: ...

    @property
    def text(self) -> str | None: ...


class Refusing(TextPiece, Protocol):
    @property
    def refusal(self) -> str | None: ...


Refusable = TypeVar("Refusable", bound=Refusing)


def plain_text(where: str, content: str | Sequence[TextPiece], types: Container[str], wanted: str) -> str:
    """Pieces of the types stand on lines of their own. Raises InvalidRequestError, which says what is `wanted`."""
    if isinstance(content, str):
        return content
    for index, piece in enumerate(content):
        if piece.type not in types or piece.text is None:
            given = f"is of type {shown(piece.type)}, " if piece.type not in types else ""
            raise InvalidRequestError(f"{where}[{index}]", f"{given}must be a {wanted}")
    return "\n".join(piece.text or "" for piece in content)


def with_refusals(role: str, content: str | Sequence[Refusable]) -> str | Sequence[Refusable]:
    """What an assistant has refused is a text of its history."""
    if role != "assistant" or isinstance(content, str):
        return content
    said: Sequence[Any] = content
    return [replace(part, type="text", text=part.refusal) if part.type == "refusal" else part for part in said]


def _message_text(where: str, role: str, content: str | Sequence[TextPart] | None) -> str:
    if content is None:
        raise InvalidRequestError(where, "is missing")
    return plain_text(where, with_refusals(role, content), ("text",), "part of type 'text' with a text")
