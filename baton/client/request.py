"""Requests for text, from Python's own types."""

from collections.abc import Mapping, Sequence, Set
from json import dumps
from typing import Any, Literal, TypedDict, cast

from baton.client.chat import CHAT_FIELDS, Message, Tool, chat_messages, set_field
from baton_proto.generated import inference_pb2 as pb
from runtime.errors import InvalidRequestError, UnknownFieldError, nearest, shown

Prompt = str | Sequence[int] | Sequence[Message]
"""A text, token ids, or the messages of a chat."""


class Options(TypedDict, total=False):
    """The options of a request beside its prompt; None is the service's default. docs/serving.md has the bounds."""

    temperature: float | None  # 1.0; 0 is greedy
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    seed: int | None  # the same seed gives the same text; random
    max_tokens: int | None  # what the context leaves
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    logprobs: int | None  # alternatives per token; 0 gives the sampled token's alone
    prompt_logprobs: int | None  # as logprobs, of the prompt's tokens but the first
    logprob_token_ids: Sequence[int] | None  # with logprobs: alternatives, instead of the best ones
    logit_bias: Mapping[int, float] | None
    bad_words: Sequence[str] | None  # texts that the answer must not have
    allowed_token_ids: Sequence[int] | None  # the answer has no other tokens
    vllm_xargs: str | None  # JSON of an object, for workers with vLLM alone
    repetition_detection: Mapping[str, int] | None  # max_pattern_size, min_pattern_size, min_count; for vLLM alone
    n: int | None  # choices
    grammar: Mapping[str, Any] | None  # one of: json_schema, regex, choice (texts), ebnf, structural_tag, json_object
    # Of a chat:
    tools: Sequence[Tool] | None  # what the model may call
    tool_choice: Literal["auto", "none", "required"] | None
    named_tool: str | None  # the one tool that must be called
    allowed_tools: Sequence[str] | None  # the tools that may be called; all
    parallel_tool_calls: bool | None  # more than one call may be made, which is the default
    template_variables: Mapping[str, Any] | None  # of the chat template, such as enable_thinking
    reasoning_effort: str | None  # of the chat template; "none" also sets its enable_thinking to false
    thinking_token_budget: int | None  # tokens of reasoning, after which it is ended
    with_parts: bool | None  # content, reasoning and calls apart, as they always are with tools or a thinking budget
    # Of the request itself:
    model: str  # the one that is served
    request_id: str  # stands in every log line of the request
    priority: int  # higher is served first
    cache_salt: str  # only requests with the same salt share cached prefixes
    keep_cache_s: int  # the prompt's KV is given up after that of others for so long
    prompt_cache_key: str  # of the session that goes on from this prompt: as a keep_cache_s of 300
    drop_cache: bool  # nobody asks for this prompt again: its KV is given up first


SAMPLING = [field.name for field in pb.SamplingOptions.DESCRIPTOR.fields]


def generate_request(prompt: Prompt, sampling: object, options: Options) -> pb.GenerateRequest:
    """`sampling`: a mapping, or an object with attributes of these names; `options` go before it. Raises
    InvalidRequestError, which names the field."""
    given = _given(sampling) | {name: value for name, value in options.items() if value is not None}
    request, of_chat = pb.GenerateRequest(), dict[str, Any]()
    for name, value in given.items():
        if name in SAMPLING:
            set_field(request.sampling, name, _as_written(name, value))
        elif name in CHAT_FIELDS:
            of_chat[name] = value
        elif name in Options.__annotations__:
            set_field(request, name, value)
        else:
            raise UnknownFieldError(name, nearest(name, Options.__annotations__))
    if not has_order(prompt) or not hasattr(prompt, "__len__"):
        raise InvalidRequestError("prompt", f"must be a text, token ids or messages, not {type(prompt).__name__}")
    is_chat = len(prompt) > 0 and isinstance(prompt[0], Mapping)
    if is_chat:
        set_field(request, "chat", chat_messages(cast("Sequence[Message]", prompt), of_chat))
    elif of_chat:
        raise InvalidRequestError(next(iter(of_chat)), "is for chats: give messages as the prompt")
    elif isinstance(prompt, str):
        set_field(request, "text", prompt)
    else:
        set_field(request.tokens, "ids", prompt)
        request.tokens.SetInParent()  # an empty list is for the service to refuse
    return request


def has_order(given: object) -> bool:
    """True for what may be a text, ids or messages; bytes, sets and arrays of no dimension are none."""
    return not isinstance(given, bytes | bytearray | memoryview | Mapping | Set) and getattr(given, "ndim", 1) != 0


def _given(sampling: object) -> dict[str, Any]:
    """Returns the fields of `sampling` that are not None. Raises InvalidRequestError."""
    if isinstance(sampling, Mapping):
        found = dict(sampling)
    else:
        found = {name: getattr(sampling, name) for name in SAMPLING if hasattr(sampling, name)}
        if sampling is not None and not found:
            raise InvalidRequestError("sampling", f"{shown(sampling)} is no mapping and has no attribute {SAMPLING[0]}")
    return {name: value for name, value in found.items() if value is not None}


def _as_written(name: str, value: Any) -> Any:
    """Converts a value to the form of SamplingOptions: a single stop string, a grammar as a mapping."""
    if name == "stop" and isinstance(value, str):
        return [value]
    if name != "grammar" or not isinstance(value, Mapping):
        return value
    return {kind: _rule(kind, rule) for kind, rule in value.items()}


def _rule(kind: str, rule: Any) -> Any:
    match kind:
        case "choice":
            return {"texts": rule}
        case "json_object":
            return {}
    return dumps(rule) if isinstance(rule, Mapping) else rule
