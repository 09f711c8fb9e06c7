"""Translates between the messages of inference.proto and the router's own types."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

from baton_proto.generated import inference_pb2 as pb
from baton_proto.grammar import Grammar
from baton_proto.sampling import PARAMETERS, TokenLogprobs
from router.api.wishes.json_shape import check_depth
from router.api.wishes.names import check_name
from router.api.wishes.prompt_logprobs import rows_in_parts
from router.api.wishes.sampling_options import Options
from router.api.wishes.structured_output import json_grammar
from router.api.wishes.template_variables import template_variables, thinking_variables
from router.api.wishes.tools import (
    CalledFunction,
    ToolCall,
    allowed_choice,
    check_named,
    named_choice,
    plain_calls,
    schema_object,
    tool_use,
)
from router.api.wishes.validation import MAX_MESSAGES, Chat, Prompt, check_thinking, plain_role
from router.parsing.events import Arguments, CallBegun, CallCut, Event, Reasoning, Text
from router.requests.request import Finished, Piece
from router.text.chat_template import Message
from router.text.tokenizer import Tokenizer
from runtime.errors import InvalidRequestError

FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
    "repetition": pb.FINISH_REASON_REPETITION,
}
TOOL_CHOICES = {pb.TOOL_CHOICE_AUTO: "auto", pb.TOOL_CHOICE_NONE: "none", pb.TOOL_CHOICE_REQUIRED: "required"}
HARMLESS_CHOICES = (pb.TOOL_CHOICE_AUTO, pb.TOOL_CHOICE_NONE)  # where there are no tools
PROMPT_FIELDS = {"text": "text", "chat": "chat.messages", "tokens": "tokens.ids", None: "input"}
"""Kind of input -> the caller's name of the prompt."""

SERVED_BY = [field.name for field in pb.ServedBy.DESCRIPTOR.fields]  # each is an attribute of Service


def prompt_of(request: pb.GenerateRequest) -> Prompt:
    """Raises InvalidRequestError when there is no prompt, or a message with an unknown role."""
    match request.WhichOneof("input"):
        case "text":
            return request.text
        case "chat":
            return _chat(request.chat)
        case "tokens":
            return request.tokens.ids
    raise InvalidRequestError("input", "is missing; one of text, chat and tokens is needed")


def _chat(chat: pb.ChatMessages) -> Chat:
    """Raises InvalidRequestError."""
    if (num := len(chat.messages)) > MAX_MESSAGES:
        raise InvalidRequestError("chat.messages", f"has {num} messages; at most {MAX_MESSAGES} are allowed")
    messages = [_message(f"chat.messages[{i}]", message) for i, message in enumerate(chat.messages)]
    tools, variables = _tools(chat), chat.template_variables.encode()
    size = sum(len(call.arguments) for message in chat.messages for call in message.tool_calls)
    size += memoryview(tools).nbytes + len(variables)
    use, budget = None, chat.thinking_token_budget if chat.HasField("thinking_token_budget") else None
    chosen = chat.tool_choice not in HARMLESS_CHOICES or chat.named_tool or chat.allowed_tools
    if chat.tools or chosen or chat.with_parts or budget is not None:
        parallel = chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else None
        use = tool_use(tools, _tool_choice(chat), parallel, "chat.tools[{}].parameters")
    effort = thinking_variables(check_name("chat.reasoning_effort", chat.reasoning_effort) or None)
    told = template_variables(Raw(variables), "chat.template_variables")
    return Chat(messages, {**effort, **told}, size, use, check_thinking("chat.thinking_token_budget", budget))


def _tool_choice(chat: pb.ChatMessages) -> Any:
    """The choice in the form of OpenAI's API. Raises InvalidRequestError."""
    if (choice := TOOL_CHOICES.get(chat.tool_choice)) is None:
        raise InvalidRequestError("chat.tool_choice", f"is {chat.tool_choice}, which is none of ToolChoice")
    if not chat.allowed_tools:
        return named_choice(chat.named_tool) if chat.named_tool else choice
    if chat.named_tool or choice == "none":
        other = "named_tool" if chat.named_tool else "tool_choice"
        raise InvalidRequestError("chat.allowed_tools", f"contradicts {other}: leave one of them out")
    names = [tool.name for tool in chat.tools]
    for i, name in enumerate(chat.allowed_tools):
        check_named(f"chat.allowed_tools[{i}]", name, names)
    return allowed_choice(choice, chat.allowed_tools)


def _tools(chat: pb.ChatMessages) -> Raw:
    """The tools in the form of OpenAI's API."""
    told = []
    for i, tool in enumerate(chat.tools):
        function: dict[str, Any] = {"name": tool.name}
        if tool.description:
            function["description"] = tool.description
        if tool.parameters:
            function["parameters"] = schema_object(f"chat.tools[{i}].parameters", tool.parameters)
        if tool.strict:
            function["strict"] = True
        told.append({"type": "function", "function": function})
    return Raw(msgspec.json.encode(told)) if told else Raw(b"")


def _message(where: str, message: pb.ChatMessage) -> Message:
    plain: dict[str, Any] = {"role": plain_role(where, message.role), "content": message.content}
    if message.name:
        plain["name"] = check_name(f"{where}.name", message.name)
    if message.tool_call_id:
        plain["tool_call_id"] = check_name(f"{where}.tool_call_id", message.tool_call_id)
    if message.reasoning:
        plain["reasoning_content"] = message.reasoning
    if message.tool_calls:
        for i, call in enumerate(message.tool_calls):
            check_name(f"{where}.tool_calls[{i}].id", call.id)
            check_name(f"{where}.tool_calls[{i}].name", call.name)
        calls = [ToolCall(CalledFunction(call.name, call.arguments), call.id) for call in message.tool_calls]
        plain["tool_calls"] = plain_calls(f"{where}.tool_calls", calls)
    return plain


def prompt_field_of(request: pb.GenerateRequest) -> str:
    return PROMPT_FIELDS[request.WhichOneof("input")]


def options_of(sampling: pb.SamplingOptions) -> Options:
    fields = {field.name: value for field, value in sampling.ListFields()}
    grammar = fields.pop("grammar", None)
    given = {name: _as_written(value) for name, value in fields.items()}
    if grammar is not None:
        given["grammar"] = grammar_of(grammar)
    if (xargs := fields.get("vllm_xargs")) is not None:
        given["vllm_xargs"] = _xargs(xargs)
    return Options(stop=given.pop("stop", ()), n=given.pop("n", None), given=given)


def _xargs(text: str) -> Any:
    """Raises InvalidRequestError."""
    check_depth("vllm_xargs", text)
    try:
        return msgspec.json.decode(text, type=PARAMETERS["vllm_xargs"].type)
    except msgspec.DecodeError as error:
        raise InvalidRequestError("vllm_xargs", str(error)) from error


def grammar_of(message: pb.Grammar) -> Grammar:
    """Raises InvalidRequestError when it says nothing."""
    match message.WhichOneof("kind"):
        case None:
            raise InvalidRequestError("grammar", "is empty; one of its kinds is needed")
        case "json_object":
            return Grammar("json_object")
        case "choice":
            return Grammar("choice", choices=tuple(message.choice.texts))
        case "json_schema" | "structural_tag" as kind:
            return json_grammar(kind, f"grammar.{kind}", getattr(message, kind))
        case kind:
            return Grammar(kind, getattr(message, kind))


def piece_response(request_id: str, bookmark: str, piece: Piece, tokenizer: Tokenizer) -> pb.GenerateResponse:
    """Fills the message in place: made of parts, which are copied, it takes four times as long."""
    response = pb.GenerateResponse(request_id=request_id, bookmark=bookmark)
    message = response.piece
    message.SetInParent()
    message.index = piece.index
    message.token_ids.extend(piece.token_ids)
    message.text = piece.text
    if piece.logprobs:
        told = zip(piece.token_ids, piece.logprobs, strict=True)
        message.logprobs.extend([_logprob_message(token_id, logprobs, tokenizer) for token_id, logprobs in told])
    if piece.finish_reason is not None:
        message.finish_reason = FINISH_REASONS[piece.finish_reason]
    if piece.parsed is not None:
        message.parts.extend(map(_part, piece.parsed.events))
    return response


def _part(event: Event) -> pb.Part:
    match event:
        case Text(text):
            return pb.Part(content=text)
        case Reasoning(text):
            return pb.Part(reasoning=text)
        case CallBegun(index, call_id, name):
            return pb.Part(call_begun=pb.CallBegun(index=index, id=call_id, name=name))
        case Arguments(index, text):
            return pb.Part(call_arguments=pb.CallArguments(index=index, text=text))
        case CallCut(index):
            return pb.Part(call_cut=pb.CallCut(index=index))


def prompt_messages(piece: Piece, prompt: NDArray[np.uint32], tokenizer: Tokenizer) -> Iterator[pb.PromptLogprobs]:
    """Yields the log-probabilities of the piece's prompt, part by part."""
    first = 0
    for rows in rows_in_parts(prompt, piece.prompt_logprobs) if piece.prompt_logprobs is not None else ():
        known = [(row.token_id, TokenLogprobs(row.logprob, row.top)) for row in rows if row.logprob is not None]
        if known:
            tokens = [_logprob_message(token_id, logprobs, tokenizer) for token_id, logprobs in known]
            yield pb.PromptLogprobs(index=piece.index, first=first, tokens=tokens)
        first += len(rows)


def finished_message(finished: Finished, reasoning_tokens: int = 0) -> pb.Finished:
    usage = pb.Usage(
        prompt_tokens=finished.tokens.prompt_tokens,
        completion_tokens=finished.tokens.output_tokens,
        cached_tokens=finished.tokens.cached_tokens,
        reasoning_tokens=reasoning_tokens,
    )
    served_by = [pb.ServedBy(**{name: getattr(one, name) for name in SERVED_BY}) for one in finished.served_by]
    return pb.Finished(usage=usage, served_by=served_by)


def _logprob_message(token_id: int, logprobs: TokenLogprobs, tokenizer: Tokenizer) -> pb.TokenLogprob:
    top = [
        pb.TopLogprob(token_id=other_id, text=tokenizer.token_text(other_id), logprob=logprob)
        for other_id, logprob in logprobs.top
    ]
    text = tokenizer.token_text(token_id)
    return pb.TokenLogprob(token_id=token_id, text=text, logprob=logprobs.logprob, top=top)


def _as_written(value: Any) -> Any:
    """A field's value in Python's types. A 32-bit float becomes the decimal that the caller meant: 0.7, not
    0.699999988. The same request over HTTP says 0.7."""
    match value:
        case float():
            return float(f"{value:.7g}")
        case int() | str():
            return value
        case Mapping():
            return {key: _as_written(number) for key, number in value.items()}
    return tuple(value)
