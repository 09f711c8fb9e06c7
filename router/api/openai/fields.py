"""The fields that OpenAI's HTTP API and its extensions name: served, taken without effect, or not served.

Fields without effect are not even decoded. A field that is not served is refused unless it has the value that changes
nothing. Every other name is unknown.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from msgspec import Raw, Struct

from baton_proto.images import Url
from baton_proto.sampling import PARAMETERS
from router.api.dialects.extensions import TextBody
from router.api.dialects.image_parts import with_images, with_slots
from router.api.dialects.json_body import ABSENT
from router.api.dialects.text_parts import plain_text, with_refusals
from router.api.wishes.cache_hints import CacheControl
from router.api.wishes.names import Name
from router.api.wishes.sampling_options import AS_NAMED
from router.api.wishes.structured_output import STRUCTURED
from router.api.wishes.tools import ToolCall, plain_calls
from router.api.wishes.validation import plain_role
from router.text.chat_template import Message
from runtime.errors import InvalidRequestError

WITHOUT_EFFECT = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "parallel_tool_calls",
    "spaces_between_special_tokens",
    "session_id",
    "stream_interval",
    "return_token_offsets",
    "mm_payload",
    "return_mm_kwargs",
    "return_assistant_tokens_mask",
)

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
    "chat_template": (),
    "prompt_embeds": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "return_prompt_text": (False,),
    "return_weight_versions": (False,),
    "routed_experts_prompt_start": (0,),
    "watermarking": (True,),
}
"""Fields that are known and not served -> the values that change nothing, besides null."""

NOT_SERVED_IN_MESSAGES = ("function_call", "refusal", "audio")
"""Fields of a message that are known and not served, unless they are empty."""

if TYPE_CHECKING:

    class NamedFields(TextBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """msgspec defines this class below, with one field for each sampling parameter and each name above. An absent
        field is None."""

        max_tokens: int | None = None
        logprobs: Any = None
        prompt_logprobs: int | None = None

else:
    _NAMED = [(name, PARAMETERS[name].type | None, None) for name in AS_NAMED]
    _NAMED += [(name, Any, None) for name in (*STRUCTURED, *NOT_SERVED)]
    _NAMED += [(name, Raw, ABSENT) for name in WITHOUT_EFFECT]
    NamedFields = msgspec.defstruct("NamedFields", _NAMED, bases=(TextBody,), frozen=True, kw_only=True)


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # without effect: our events have no padding
    continuous_usage_stats: bool | None = (
        None  # vLLM's: with include_usage, each chunk tells how far its choice has come
    )


class ImageUrl(Struct, frozen=True):
    """`detail` and the like are without effect: the server's processor decides."""

    url: Url


class TextPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Name
    text: str | None = None
    refusal: str | None = None  # of a part of that type, which is read as a text
    cache_control: CacheControl | None = None
    image_url: ImageUrl | Url | None = None  # of a part of that type
    input_audio: Raw = ABSENT  # of parts of other types, which are refused as such
    file: Raw = ABSENT


class ChatMessage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    not_served: ClassVar[Sequence[str]] = NOT_SERVED_IN_MESSAGES

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

    def keeps_s(self, where: str) -> Iterator[float]:
        """The seconds for which its parts ask to stay cached. Raises InvalidRequestError."""
        for i, part in enumerate(() if isinstance(self.content, str | None) else self.content):
            if part.cache_control is not None:
                yield part.cache_control.keep_s(f"{where}.content[{i}].cache_control")

    def plain(self, where: str) -> Message:
        """The message as templates know it. Raises InvalidRequestError."""
        role = plain_role(where, self.role)
        if self.function_call or self.refusal or self.audio:
            name = next(name for name in self.not_served if getattr(self, name))
            raise InvalidRequestError(f"{where}.{name}", "is not supported; leave it out")
        no_content = self.content is None and self.tool_calls
        said = {"content": ""} if no_content else _said(f"{where}.content", role, self.content)
        plain: dict[str, Any] = {"role": role, **said}
        if self.name is not None:
            plain["name"] = self.name
        if self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            plain["tool_calls"] = plain_calls(f"{where}.tool_calls", self.tool_calls)
        if reasoning := self.reasoning_content or self.reasoning:
            plain["reasoning_content"] = reasoning
        return plain


def _said(where: str, role: str, content: str | Sequence[TextPart] | None) -> dict[str, Any]:
    """The content, and the images of a user's message."""
    if content is None:
        raise InvalidRequestError(where, "is missing")
    texts, images = with_slots(where, role, content, _image_url)
    text = plain_text(where, with_refusals(role, texts), ("text",), "part of type 'text' with a text")
    return with_images(where, text, images)


def _image_url(part: TextPart) -> str | None:
    if part.type != "image_url":
        return None
    return part.image_url.url if isinstance(part.image_url, ImageUrl) else part.image_url or ""
