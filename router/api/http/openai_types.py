"""What OpenAI's HTTP API takes, field by field, and how it becomes what validation checks.

Unknown fields are ignored, as other servers of this API do. Known fields that cannot be served are refused unless they
have the value that changes nothing. The sampling parameters are the fields of SamplingParams: OpenAI's, and extensions
as vLLM names them.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import msgspec
from msgspec import Struct

from baton_proto.sampling import PARAMETERS
from router.api.sampling_options import Options
from router.api.validation import MIXTURE, Chat, Prompt, plain_role
from router.text.chat_template import Message
from runtime.errors import InvalidRequestError

MAX_PROMPTS = 64

# Half of an emoji, which a program leaves that cuts text by UTF-16 units; msgspec takes it for the end of the data.
_HALF_CHARACTER = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)

Body = TypeVar("Body", bound="GenerationBody")


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None


class TextPart(Struct, frozen=True):
    type: str
    text: str | None = None


class ChatMessage(Struct, frozen=True):
    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None


# Fields that are known and not served -> the values that change nothing, besides null.
NOT_IN_CHATS: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}
NOT_IN_COMPLETIONS: Mapping[str, tuple[Any, ...]] = {"echo": (False,), "suffix": ("",), "best_of": (1,)}

if TYPE_CHECKING:

    class NamedFields(Struct, frozen=True, kw_only=True):
        """As msgspec defines it below: one field for each sampling parameter and for each field that is not served. A
        field that is absent or null is None."""

else:
    _NAMED = [(row.name, row.type | None, None) for row in PARAMETERS.values()]
    _NAMED += [(name, Any, None) for name in (*NOT_IN_CHATS, *NOT_IN_COMPLETIONS)]
    NamedFields = msgspec.defstruct("NamedFields", _NAMED, frozen=True, kw_only=True)


class GenerationBody(NamedFields, frozen=True, kw_only=True):
    """What both endpoints share."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    prompt_field: ClassVar[str] = "prompt"

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    priority: int | None = None
    cache_salt: str | None = None  # as in vLLM

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def prompts(self) -> Sequence[Prompt]:
        """One or more. Raises InvalidRequestError."""
        raise NotImplementedError

    def options(self) -> Options:
        """Raises InvalidRequestError."""
        given = {name: value for name in PARAMETERS if (value := getattr(self, name)) is not None}
        names = self.adapt(given)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        return Options(given=given, names=names, stop=stop, n=self.n)

    def adapt(self, given: dict[str, Any]) -> Mapping[str, str]:
        """Changes the sampling parameters where the endpoint spells one differently. Returns the caller's names of
        those. Raises InvalidRequestError."""
        raise NotImplementedError


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """/v1/chat/completions"""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = NOT_IN_CHATS
    prompt_field: ClassVar[str] = "messages"

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def adapt(self, given: dict[str, Any]) -> Mapping[str, str]:
        names = {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
            names["max_tokens"] = "max_completion_tokens"
        if given.pop("logprobs", False):
            given["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs is not None:
            raise InvalidRequestError("top_logprobs", "needs logprobs to be true")
        return names

    def prompts(self) -> Sequence[Prompt]:
        messages = [_plain_message(f"messages[{i}]", message) for i, message in enumerate(self.messages)]
        return [Chat(messages, self.chat_template_kwargs or {})]


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """/v1/completions"""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = NOT_IN_COMPLETIONS
    default_max_tokens: ClassVar[int] = 16

    prompt: str | list[str | int | list[int]]

    def adapt(self, given: dict[str, Any]) -> Mapping[str, str]:
        given.setdefault("max_tokens", self.default_max_tokens)
        return {}

    def prompts(self) -> Sequence[Prompt]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidRequestError("prompt", "is empty; at least one token is needed")
        if isinstance(self.prompt[0], int):
            return [cast(list[int], self.prompt)]  # validation checks that all are token ids
        if len(set(map(type, self.prompt))) > 1:
            raise InvalidRequestError("prompt", MIXTURE)
        if len(self.prompt) > MAX_PROMPTS:
            raise InvalidRequestError("prompt", f"has {len(self.prompt)} prompts; at most {MAX_PROMPTS} are allowed")
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]


def parse_body(data: bytes, kind: type[Body]) -> Body:
    """Raises InvalidRequestError, naming the field where there is one."""
    try:
        body = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at ")
        raise InvalidRequestError(_field_name(path, problem), problem) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        half = _HALF_CHARACTER.search(data)
        problem = f"{half[0].decode()} is half a character" if half else str(error)
        raise InvalidRequestError("body", f"is not valid JSON: {problem}") from error
    for name, harmless in kind.unsupported.items():
        value = getattr(body, name)
        if value is not None and value not in harmless:
            raise InvalidRequestError(name, "is not supported")
    return body


def _field_name(path: str, problem: str) -> str:
    """From msgspec's path, such as `$.stop`; a required field that is missing stands in the text instead."""
    field = path.rpartition("$")[2].strip("`.")
    if "missing required field" in problem:
        field = ".".join(filter(None, (field, problem.rpartition("field ")[2].strip("`"))))
    return field or "body"


def _plain_message(where: str, message: ChatMessage) -> Message:
    role = plain_role(where, message.role)
    if message.tool_calls or message.function_call:
        raise InvalidRequestError(f"{where}.tool_calls", "is not supported")
    plain = {"role": role, "content": _plain_content(f"{where}.content", message.content)}
    return plain if message.name is None else plain | {"name": message.name}


def _plain_content(where: str, content: str | list[TextPart] | None) -> str:
    """Text parts stand on lines of their own."""
    if content is None:
        raise InvalidRequestError(where, "is missing")
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise InvalidRequestError(f"{where}[{index}]", "must be a part of type 'text' with a text")
    return "\n".join(part.text or "" for part in content)
