"""Makes a response of a request's pieces. A whole response is what the events of a streamed one add up to."""

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping

from msgspec import UNSET, Struct

from router.api.dialects.dialect import Answer
from router.api.http.errors import ErrorBody
from router.api.openai.answers import CompletionTokensDetails
from router.api.openai.chat import TokenLogprob, token_logprobs
from router.api.openai.token_names import TokenNames
from router.api.responses.output import (
    CallEvent,
    Incomplete,
    InputTokensDetails,
    ItemEvent,
    OutputItem,
    OutputText,
    PartEvent,
    ReasoningText,
    Response,
    ResponseError,
    ResponseEvent,
    ResponseUsage,
    TextEvent,
)
from router.api.responses.tools import CalledAs, input_of
from router.parsing.events import Arguments, CallBegun, CallCut, Event, Reasoning, Text
from router.requests.request import Finished, Piece
from router.text.tokenizer import Tokenizer

Keep = Callable[[Response], Awaitable[None] | None]


class ResponseAnswer(Answer):
    def __init__(
        self, response: Response, tokenizer: Tokenizer, keep: Keep | None, called_as: Mapping[str, CalledAs]
    ) -> None:
        """`response`: what was asked; `keep`: for the response when it is complete; `called_as`: by the names that
        calls have in the answer."""
        self._response = response
        self._tokenizer, self._names = tokenizer, TokenNames(tokenizer)
        self._keep = keep
        self._called_as = called_as
        self._begun = False
        self._number = 0  # of the next event
        self._num_cut = 0  # calls that a stream has begun and that are no part of the response
        self._item: OutputItem | None = None  # that is being written, the last of the output
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text is still to come
        self._arguments = ""  # of the call of a custom tool that is being written
        self._reasoning_tokens = 0
        self._cut = False

    # --- what the endpoint calls ----------------------------------------------------------------------------------

    def go_on(self, number: int) -> None:
        self._number = number

    def chunks(self, piece: Piece) -> Iterator[Struct]:
        if not self._begun:
            self._begun = True
            yield ResponseEvent("response.created", self._next(), self._response)
            yield ResponseEvent("response.in_progress", self._next(), self._response)
        self._logprobs += token_logprobs(self._tokenizer, self._names, piece)
        self._cut = piece.finish_reason == "length"
        self._reasoning_tokens += piece.reasoning_tokens
        for event in piece.events:
            yield from self._take(event)
        if piece.finish_reason is not None:
            yield from self._end_item("incomplete" if self._cut else "completed")

    def ending(self, finished: Finished) -> Iterator[Struct]:
        response = self._response
        response.status = "incomplete" if self._cut else "completed"
        response.incomplete_details = Incomplete("max_output_tokens") if self._cut else None
        response.completed_at = None if self._cut else int(time.time())
        response.usage = ResponseUsage(
            finished.tokens.prompt_tokens,
            InputTokensDetails.of(finished),
            finished.tokens.output_tokens,
            CompletionTokensDetails(self._reasoning_tokens),
            finished.total_tokens,
        )
        if self._keep is not None:
            self.saved = self._keep(response)
        yield ResponseEvent(f"response.{response.status}", self._next(), response)

    def failure(self, status: int, error: ErrorBody) -> Struct:
        self._response.status = "failed"
        code = "rate_limit_exceeded" if status == 429 else "server_error"
        self._response.error = ResponseError(code, error.message)
        return ResponseEvent("response.failed", self._next(), self._response)

    def whole(self, finished: Finished) -> Response:
        for _ in self.ending(finished):
            pass
        return self._response

    # --- the items as they grow -----------------------------------------------------------------------------------

    def _take(self, event: Event) -> Iterator[Struct]:
        match event:
            case Text(text):
                yield from self._write("message", text)
            case Reasoning(text):
                yield from self._write("reasoning", text)
            case CallBegun(_, call_id, name):
                self._logprobs = []
                yield from self._begin(self._call_item(call_id, self._called_as.get(name) or CalledAs(name)))
            case Arguments(_, text) if self._is_custom:
                self._arguments += text
            case Arguments(_, text):
                item = self._open("function_call")
                item.arguments = (item.arguments or "") + text
                kind = "response.function_call_arguments.delta"
                yield CallEvent(kind, self._next(), self._index, item.id, delta=text)
            case CallCut():  # nobody may make the call; a response that is complete has no item that is not done
                item = self._open("custom_tool_call" if self._is_custom else "function_call")
                item.status = "incomplete"
                if not self._cut:
                    yield ItemEvent("response.output_item.done", self._next(), self._index, item)
                self._response.output.pop()
                self._num_cut += 1
                self._item = None

    def _call_item(self, call_id: str, called: CalledAs) -> OutputItem:
        if called.kind == "function":
            item = OutputItem("function_call", self._new_id("fc"), call_id=call_id, name=called.name, arguments="")
        else:
            item = OutputItem("custom_tool_call", self._new_id("ctc"), call_id=call_id, name=called.name, input="")
            self._arguments = ""
        if called.namespace is not None:
            item.namespace = called.namespace
        return item

    @property
    def _is_custom(self) -> bool:
        return self._item is not None and self._item.type == "custom_tool_call"

    def _write(self, kind: str, text: str) -> Iterator[Struct]:
        """Adds to the text of an item of the kind, which begins with it as the case may be."""
        if self._item is None or self._item.type != kind:
            if kind == "message":
                item = OutputItem(kind, self._new_id("msg"), role="assistant", content=[])
            else:
                item = OutputItem(kind, self._new_id("rs"), summary=[], content=[])
            yield from self._begin(item)
            part = OutputText() if kind == "message" else ReasoningText()
            yield PartEvent("response.content_part.added", self._next(), self._index, item.id, 0, part)
            item.content = [part]
        item = self._open(kind)
        assert item.content
        (part,) = item.content
        part.text += text
        logprobs, self._logprobs = self._logprobs, []
        where = self._next(), self._index, item.id, 0
        if isinstance(part, OutputText):
            part.logprobs += logprobs
            yield TextEvent("response.output_text.delta", *where, delta=text, logprobs=logprobs)
        else:
            yield TextEvent("response.reasoning_text.delta", *where, delta=text)

    def _begin(self, item: OutputItem) -> Iterator[Struct]:
        yield from self._end_item("completed")
        self._response.output.append(item)
        self._item = item
        yield ItemEvent("response.output_item.added", self._next(), self._index, item)

    def _end_item(self, status: str) -> Iterator[Struct]:
        item, self._item = self._item, None
        if item is None:
            return
        item.status = status
        if item.type == "function_call":
            kind = "response.function_call_arguments.done"
            done = {"arguments": item.arguments, "name": item.name}
            yield CallEvent(kind, self._next(), self._index, item.id, **done)
        if item.type == "custom_tool_call":
            item.input = input_of(self._arguments)
            kind = "response.custom_tool_call_input"
            yield CallEvent(f"{kind}.delta", self._next(), self._index, item.id, delta=item.input)
            yield CallEvent(f"{kind}.done", self._next(), self._index, item.id, input=item.input)
        for part in item.content or ():
            where = self._next(), self._index, item.id, 0
            if isinstance(part, OutputText):
                yield TextEvent("response.output_text.done", *where, text=part.text, logprobs=part.logprobs)
            else:
                yield TextEvent("response.reasoning_text.done", *where, text=part.text)
            yield PartEvent("response.content_part.done", self._next(), self._index, item.id, 0, part)
        yield ItemEvent("response.output_item.done", self._next(), self._index, item)

    def _open(self, kind: str) -> OutputItem:
        assert self._item is not None
        assert self._item.type == kind
        return self._item

    @property
    def _index(self) -> int:
        return len(self._response.output) - 1 + self._num_cut

    def _next(self) -> int:
        number = self._number
        self._number += 1
        return number

    def _new_id(self, prefix: str) -> str:
        """Unique in what the caller may send back to us, because the response's own id is."""
        return f"{prefix}_{self._response.id.partition('_')[2]}_{len(self._response.output)}"


def text_of(item: OutputItem) -> str:
    return "" if item.content is UNSET else "".join(part.text for part in item.content)
