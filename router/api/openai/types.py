"""Bodies of OpenAI's HTTP API, and what validation checks of them.

The sampling parameters are the fields of SamplingParams: OpenAI's, and extensions as vLLM names them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

from msgspec import Raw, Struct

from router.api.dialects.json_body import ABSENT
from router.api.openai.fields import NOT_SERVED, WITHOUT_EFFECT, ChatMessage, NamedFields, StreamOptions, TextPart
from router.api.openai.shown_prompt import NO_WISH, PromptWish
from router.api.wishes.cache_hints import CacheOptions, openai_keeps_s
from router.api.wishes.names import Name
from router.api.wishes.sampling_options import AS_NAMED, Options
from router.api.wishes.structured_output import STRUCTURED, grammar_of
from router.api.wishes.template_variables import (
    document_variables,
    template_variables,
    thinking_variables,
    verbosity_variables,
)
from router.api.wishes.tools import tool_use
from router.api.wishes.validation import MAX_MESSAGES, MIXTURE, UNLIMITED, Chat, Prompt, check_thinking
from router.text.chat_template import Ending, Message
from runtime.errors import InvalidRequestError

MAX_PROMPTS = 64


class GenerationBody(NamedFields, frozen=True, kw_only=True):
    """The fields that both endpoints share."""

    inner: ClassVar[Mapping[str, type[Struct]]] = {
        "messages": ChatMessage,
        "content": TextPart,
        "stream_options": StreamOptions,
        "prompt_cache_options": CacheOptions,
    }
    not_served: ClassVar[Mapping[str, tuple[Any, ...]]] = NOT_SERVED
    without_effect: ClassVar[Sequence[str]] = WITHOUT_EFFECT
    prompt_field: ClassVar[str] = "prompt"
    unstreamed: ClassVar[str] = "set stream to false, or echo and logprobs instead"

    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    echo: bool | None = None
    n: int | None = None
    return_token_ids: bool | None = None  # as in vLLM, as is the next one
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    skip_special_tokens: bool | None = None  # in the answer
    include_stop_str_in_output: bool | None = None
    prompt_cache_retention: Name | None = None  # OpenAI's, as is the next one
    prompt_cache_key: Name | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def running_usage(self) -> bool:
        """Every chunk of a stream tells the usage of its choice so far."""
        options = self.stream_options
        return options is not None and self.include_usage and bool(options.continuous_usage_stats)

    @property
    def with_reasoning(self) -> bool:
        """The answer shows it."""
        return True

    def prompts(self) -> Sequence[Prompt]:
        """One or more. Raises InvalidRequestError."""
        raise NotImplementedError

    def wish(self) -> PromptWish:
        """Tells what the answer shows of its prompts. Raises InvalidRequestError."""
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs", f"cannot be streamed; {self.unstreamed}")
        return NO_WISH if self.prompt_logprobs is None else PromptWish(details=self.prompt_logprobs)

    def keeps_s(self) -> Iterable[float]:
        return openai_keeps_s(self.prompt_cache_retention, self.prompt_cache_key)

    def options(self) -> Options:
        """Raises InvalidRequestError."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options", "needs stream to be true")
        given = {name: value for name in AS_NAMED if (value := getattr(self, name)) is not None}
        names = dict(self.adapt(given))
        if found := grammar_of({name: getattr(self, name) for name in STRUCTURED}):
            given["grammar"], names["grammar"] = found
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        return Options(
            given=given,
            names=names,
            stop=stop,
            n=self.n,
            includes_stop=bool(self.include_stop_str_in_output),
            spells_special=self.skip_special_tokens is False,
        )

    def adapt(self, given: dict[str, Any]) -> Mapping[str, str]:
        """Changes the sampling parameters where the endpoint spells one differently. Returns the caller's names of
        those. Raises InvalidRequestError."""
        raise NotImplementedError


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """/v1/chat/completions"""

    prompt_field: ClassVar[str] = "messages"
    unstreamed: ClassVar[str] = "set stream to false"

    messages: Sequence[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: Raw = ABSENT
    tools: Raw = ABSENT
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Name | None = None
    verbosity: Name | None = None  # goes to the chat template
    prompt_cache_options: CacheOptions | None = None
    thinking_token_budget: int | None = None  # as in vLLM, as are the next ones
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Raw = ABSENT  # for the chat template

    @property
    def with_reasoning(self) -> bool:
        return self.include_reasoning is not False

    def keeps_s(self) -> Iterable[float]:
        yield from openai_keeps_s(self.prompt_cache_retention, self.prompt_cache_key, self.prompt_cache_options)
        for i, message in enumerate(self.messages):
            yield from message.keeps_s(f"messages[{i}]")

    def adapt(self, given: dict[str, Any]) -> Mapping[str, str]:
        if self.add_special_tokens:
            raise InvalidRequestError("add_special_tokens", "cannot be true: a chat has those of its template")
        names = {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
            names["max_tokens"] = "max_completion_tokens"
        if given.pop("logprobs", False):
            given["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            raise InvalidRequestError("top_logprobs", "needs logprobs to be true")
        return names

    def prompts(self) -> Sequence[Prompt]:
        messages, size = plain_messages(self.messages)
        size += sum(memoryview(each).nbytes for each in (self.chat_template_kwargs, self.tools, self.documents))
        use = tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)
        budget = check_thinking("thinking_token_budget", self.thinking_token_budget)
        ending = chat_ending(self.add_generation_prompt, self.continue_final_message)
        return [Chat(messages, self._variables(), size, use, budget, ending)]

    def _variables(self) -> Mapping[str, Any]:
        told = {**verbosity_variables(self.verbosity), **thinking_variables(self.reasoning_effort)}
        return {**told, **document_variables(self.documents), **template_variables(self.chat_template_kwargs)}


def chat_ending(add_generation_prompt: bool | None, continue_final_message: bool | None) -> Ending:
    """Raises InvalidRequestError."""
    if not continue_final_message:
        return "none" if add_generation_prompt is False else "answer"
    if add_generation_prompt:
        raise InvalidRequestError("continue_final_message", "cannot be true where add_generation_prompt is")
    return "continue"


def plain_messages(messages: Sequence[ChatMessage]) -> tuple[list[Message], int]:
    """The messages as templates know them, and the characters of their calls' arguments. Raises InvalidRequestError."""
    if (num := len(messages)) > MAX_MESSAGES:
        raise InvalidRequestError("messages", f"has {num} messages; at most {MAX_MESSAGES} are allowed")
    plain = [message.plain(f"messages[{i}]") for i, message in enumerate(messages)]
    calls = (call for message in messages for call in message.tool_calls or ())
    return plain, sum(len(call.function.arguments) for call in calls)


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """/v1/completions"""

    not_served: ClassVar[Mapping[str, tuple[Any, ...]]] = {**NOT_SERVED, "thinking_token_budget": (UNLIMITED,)}
    default_max_tokens: ClassVar[int] = 16

    prompt: str | list[str | int | list[int]]
    thinking_token_budget: int | None = None

    def adapt(self, given: dict[str, Any]) -> Mapping[str, str]:
        given.setdefault("max_tokens", self.default_max_tokens)
        if self._no_output:
            given["max_tokens"] = 1  # a prompt is not computed without it
        if not self.echo or self.logprobs is None:
            return {}
        given["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return {} if given["prompt_logprobs"] == self.prompt_logprobs else {"prompt_logprobs": "logprobs"}

    @property
    def _no_output(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0

    def wish(self) -> PromptWish:
        if not self.echo:
            return super().wish()
        details = super().wish().details
        if details is None and not self.stream:
            details = self.logprobs
        return PromptWish(True, self.logprobs, details, self._no_output)

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
