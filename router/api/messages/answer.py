"""Makes a message of a request's pieces. A whole message is what the events of a streamed one add up to."""

from collections.abc import Generator, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct

from router.api.dialects.dialect import Answer
from router.api.http.errors import ErrorBody
from router.api.messages.output import (
    NO_INPUT,
    ContentBlock,
    Delta,
    Message,
    MessageError,
    MessageErrorAnswer,
    MessageEvent,
    MessageUsage,
    Stop,
    ThinkingTokens,
)
from router.parsing.events import Arguments, CallBegun, CallCut, Event, Reasoning, Text
from router.requests.request import Finished, Piece

STOP_REASONS: Mapping[str, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "repetition": "end_turn",  # Anthropic's API has no reason of its own for it
}
ERROR_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
"""By HTTP status; other refusals are `invalid_request_error`, other failures `api_error`."""


def error_answer(status: int, error: ErrorBody, request_id: str) -> MessageErrorAnswer:
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return MessageErrorAnswer(MessageError(kind, error.message), request_id or None)


class MessageAnswer(Answer):
    def __init__(self, message: Message, request_id: str, room: int | None = None) -> None:
        """`message`: with the tokens of the prompt, and nothing written. `room`: tokens that the context window leaves
        to the answer; None: all that were asked for."""
        self._message = message
        self._request_id = request_id
        self._room = room
        self._begun = False
        self._block: ContentBlock | None = None  # that is being written, the last of the content
        self._arguments: list[str] = []  # of the call that is being written
        self._parsed = False
        self._thinking_tokens = 0
        self._cut_calls: list[ContentBlock] = []

    # --- what the endpoint calls ----------------------------------------------------------------------------------

    def chunks(self, piece: Piece) -> Iterator[Struct]:
        if not self._begun:
            self._begun = True
            yield MessageEvent(type="message_start", message=self._message)
            yield MessageEvent(type="ping")
        self._parsed = self._parsed or piece.parsed is not None
        self._thinking_tokens += piece.reasoning_tokens
        for event in piece.events:
            yield from self._take(event)
        if piece.finish_reason is not None:
            yield from self._end_block()
            stop_string = piece.stop_reason if isinstance(piece.stop_reason, str) else None
            stopped = stop_string is not None and piece.finish_reason == "stop"
            self._message.stop_reason = "stop_sequence" if stopped else STOP_REASONS[piece.finish_reason]
            if piece.finish_reason == "length" and self._room is not None:
                self._message.stop_reason = "model_context_window_exceeded"
            self._message.stop_sequence = stop_string if stopped else None

    def ending(self, finished: Finished) -> Iterator[Struct]:
        message = self._message
        thought: Any = {"output_tokens_details": ThinkingTokens(self._thinking_tokens)} if self._parsed else {}
        message.usage = MessageUsage(
            input_tokens=finished.tokens.computed_tokens,
            cache_read_input_tokens=finished.tokens.cached_tokens,
            output_tokens=finished.tokens.output_tokens,
            max_tokens=UNSET if self._room is None else self._room,
            **thought,
        )
        stop = Stop(message.stop_reason, message.stop_sequence)
        yield MessageEvent(type="message_delta", delta=stop, usage=message.usage)
        yield MessageEvent(type="message_stop")

    def failure(self, status: int, error: ErrorBody) -> Struct:
        return error_answer(status, error, self._request_id)

    def whole(self, finished: Finished) -> Message:
        for _ in self.ending(finished):
            pass
        cut = list(map(id, self._cut_calls))
        self._message.content = [block for block in self._message.content if id(block) not in cut]
        return self._message

    # --- the blocks as they grow ----------------------------------------------------------------------------------

    def _take(self, event: Event) -> Iterator[Struct]:
        match event:
            case Text(text):
                block = yield from self._of_kind(ContentBlock("text", text=""))
                block.text = str(block.text) + text
                yield self._delta(Delta("text_delta", text=text))
            case Reasoning(text):
                block = yield from self._of_kind(ContentBlock("thinking", thinking="", signature=""))
                block.thinking = str(block.thinking) + text
                yield self._delta(Delta("thinking_delta", thinking=text))
            case CallBegun(_, call_id, name):
                yield from self._begin(ContentBlock("tool_use", id=call_id, name=name, input=NO_INPUT))
            case Arguments(_, text):
                self._arguments.append(text)
                yield self._delta(Delta("input_json_delta", partial_json=text))
            case CallCut():  # half a call stands in a stream, and not in a whole message
                assert self._block is not None
                self._cut_calls.append(self._block)

    def _of_kind(self, fresh: ContentBlock) -> Generator[Struct, None, ContentBlock]:
        """Begins `fresh` unless a block of its type is being written. Returns the one to write to."""
        if self._block is None or self._block.type != fresh.type:
            yield from self._begin(fresh)
        assert self._block is not None
        return self._block

    def _begin(self, block: ContentBlock) -> Iterator[Struct]:
        yield from self._end_block()
        self._message.content.append(block)
        self._block = block
        yield MessageEvent(type="content_block_start", index=self._index, content_block=block)

    def _end_block(self) -> Iterator[Struct]:
        block, self._block = self._block, None
        if block is None:
            return
        if block.type == "tool_use":
            block.input = _input("".join(self._arguments))
            self._arguments = []
        yield MessageEvent(type="content_block_stop", index=self._index)

    def _delta(self, delta: Delta) -> MessageEvent:
        return MessageEvent(type="content_block_delta", index=self._index, delta=delta)

    @property
    def _index(self) -> int:
        return len(self._message.content) - 1


def _input(arguments: str) -> Any:
    """The arguments as the object that they have to be. What the model has written and is none stands in one."""
    try:
        msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {"arguments": arguments} if arguments.strip() else {}
    return Raw(arguments.encode())
