"""The fields that OpenAI's HTTP API and its extensions name: served, taken without effect, or not served.

Fields without effect are not even decoded. A field that is not served is refused unless it has the value that changes
nothing. Every other name is unknown.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw, Struct

from baton_proto.sampling import PARAMETERS
from router.api.validation import plain_role
from router.text.chat_template import Message
from runtime.errors import InvalidRequestError

ABSENT = Raw(b"")

WITHOUT_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "parallel_tool_calls"),
    *("prompt_cache_key", "prompt_cache_retention"),
)

NOT_SERVED: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
}
"""Fields that are known and not served -> the values that change nothing, besides null."""

NOT_SERVED_IN_MESSAGES = ("tool_calls", "function_call", "tool_call_id", "refusal", "audio")
"""Fields of a message that are known and not served, unless they are empty."""

if TYPE_CHECKING:

    class NamedFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """As msgspec defines it below: one field for each sampling parameter and for each name above. A field that is
        absent or null is None."""

else:
    _NAMED = [(row.name, row.type | None, None) for row in PARAMETERS.values()]
    _NAMED += [(name, Any, None) for name in NOT_SERVED]
    _NAMED += [(name, Raw, ABSENT) for name in WITHOUT_EFFECT]
    NamedFields = msgspec.defstruct("NamedFields", _NAMED, frozen=True, kw_only=True, forbid_unknown_fields=True)


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # without effect: our events have no padding
    continuous_usage_stats: Raw = ABSENT


class TextPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: str
    text: str | None = None
    cache_control: Raw = ABSENT  # without effect: every prefix is cached
    image_url: Raw = ABSENT  # of parts of other types, which are refused as such
    input_audio: Raw = ABSENT
    file: Raw = ABSENT


class ChatMessage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: str
    content: str | Sequence[TextPart] | None = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    tool_call_id: Any = None
    refusal: Any = None
    audio: Any = None
    annotations: Raw = ABSENT  # of an answer that is sent back; without effect, as are the next two
    reasoning: Raw = ABSENT
    reasoning_content: Raw = ABSENT

    def plain(self, where: str) -> Message:
        """The message as templates know it. Raises InvalidRequestError."""
        role = plain_role(where, self.role)
        if self.tool_calls or self.function_call or self.tool_call_id or self.refusal or self.audio:
            name = next(name for name in NOT_SERVED_IN_MESSAGES if getattr(self, name))
            raise InvalidRequestError(f"{where}.{name}", "is not supported")
        plain = {"role": role, "content": _plain_content(f"{where}.content", self.content)}
        return plain if self.name is None else plain | {"name": self.name}


def _plain_content(where: str, content: str | Sequence[TextPart] | None) -> str:
    """Text parts stand on lines of their own."""
    if content is None:
        raise InvalidRequestError(where, "is missing")
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise InvalidRequestError(f"{where}[{index}]", "must be a part of type 'text' with a text")
    return "\n".join(part.text or "" for part in content)
