"""Translates between the messages of inference.proto and the router's own types."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton_proto.generated import inference_pb2 as pb
from baton_proto.grammar import Grammar
from baton_proto.sampling import TokenLogprobs
from router.api.prompts.logprobs import rows_in_parts
from router.api.sampling_options import Options
from router.api.validation import MAX_MESSAGES, Chat, Prompt, plain_role
from router.requests.request import Finished, Piece
from router.text.tokenizer import Tokenizer
from runtime.errors import InvalidRequestError

FINISH_REASONS = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
}
PROMPT_FIELDS = {"text": "text", "chat": "chat.messages", "tokens": "tokens.ids", None: "input"}
"""Kind of input -> the caller's name of the prompt."""

SERVED_BY = [field.name for field in pb.ServedBy.DESCRIPTOR.fields]  # each is an attribute of Service


def prompt_of(request: pb.GenerateRequest) -> Prompt:
    """Raises InvalidRequestError when there is no prompt, or a message with an unknown role."""
    match request.WhichOneof("input"):
        case "text":
            return request.text
        case "chat":
            if (num := len(request.chat.messages)) > MAX_MESSAGES:
                raise InvalidRequestError("chat.messages", f"has {num} messages; at most {MAX_MESSAGES} are allowed")
            messages = enumerate(request.chat.messages)
            return Chat(
                [{"role": plain_role(f"chat.messages[{i}]", m.role), "content": m.content} for i, m in messages]
            )
        case "tokens":
            return request.tokens.ids
    raise InvalidRequestError("input", "is missing; one of text, chat and tokens is needed")


def prompt_field_of(request: pb.GenerateRequest) -> str:
    return PROMPT_FIELDS[request.WhichOneof("input")]


def options_of(sampling: pb.SamplingOptions) -> Options:
    fields = {field.name: value for field, value in sampling.ListFields()}
    grammar = fields.pop("grammar", None)
    given = {name: _as_written(value) for name, value in fields.items()}
    if grammar is not None:
        given["grammar"] = grammar_of(grammar)
    return Options(stop=given.pop("stop", ()), n=given.pop("n", None), given=given)


def grammar_of(message: pb.Grammar) -> Grammar:
    """Raises InvalidRequestError when it says nothing."""
    match message.WhichOneof("kind"):
        case None:
            raise InvalidRequestError("grammar", "is empty; one of its kinds is needed")
        case "json_object":
            return Grammar("json_object")
        case "choice":
            return Grammar("choice", choices=tuple(message.choice.texts))
        case kind:
            return Grammar(kind, getattr(message, kind))


def piece_message(piece: Piece, tokenizer: Tokenizer) -> pb.Piece:
    told = zip(piece.token_ids, piece.logprobs, strict=True) if piece.logprobs else ()
    return pb.Piece(
        index=piece.index,
        token_ids=piece.token_ids,
        text=piece.text,
        logprobs=[_logprob_message(token_id, logprobs, tokenizer) for token_id, logprobs in told],
        finish_reason=FINISH_REASONS[piece.finish_reason],
    )


def prompt_messages(piece: Piece, prompt: NDArray[np.uint32], tokenizer: Tokenizer) -> Iterator[pb.PromptLogprobs]:
    """What the piece says of its prompt, part by part."""
    first = 0
    for rows in rows_in_parts(prompt, piece.prompt_logprobs) if piece.prompt_logprobs is not None else ():
        known = [(row.token_id, TokenLogprobs(row.logprob, row.top)) for row in rows if row.logprob is not None]
        if known:
            tokens = [_logprob_message(token_id, logprobs, tokenizer) for token_id, logprobs in known]
            yield pb.PromptLogprobs(index=piece.index, first=first, tokens=tokens)
        first += len(rows)


def finished_message(finished: Finished) -> pb.Finished:
    usage = pb.Usage(
        prompt_tokens=finished.prompt_tokens,
        completion_tokens=finished.completion_tokens,
        cached_tokens=finished.cached_tokens,
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
