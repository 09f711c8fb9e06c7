"""A dialect is one way to ask for text over HTTP. Each reads its own bodies and writes its own answers; the request in
between is the same."""

from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, Protocol

from msgspec import Struct

from router.api.http.errors import ErrorAnswer, ErrorBody, openai_form
from router.api.wishes.sampling_options import Options
from router.api.wishes.validation import Call, Prompt
from router.requests.frontend import Frontend
from router.requests.request import Finished, GenerateRequest, Piece


class Asked(Struct, frozen=True):
    """What a body says beside its prompts and its options."""

    call: Call  # without the caller, and without what headers say
    stream: bool
    form: Any = None  # what the dialect wants to know when it answers


class PromptAnswer(Protocol):
    """The part of an answer that shows its prompts. One of the two methods is called before each piece; other tasks may
    run between its results."""

    def prompt_chunks(self, piece: Piece) -> Iterable[Struct]:
        """The events of a prompt, at the first piece of its choice."""

    def add_prompt(self, piece: Piece) -> Iterable[None]:
        """Collects a prompt for the whole answer, part by part."""


class Answer:
    """One HTTP request's output in a dialect. A streamed answer is made of `chunks` and `ending`, a whole one of `add`
    and `whole`."""

    saved: Awaitable[None] | None = None
    """To be awaited before the last event is sent, or the whole answer: it raises nothing. None: there is nothing to
    wait for."""

    @property
    def of_prompts(self) -> PromptAnswer | None:
        """The part that shows the prompts; None: the request does not want them shown."""
        return None

    def go_on(self, number: int) -> None:
        """Where the events of the dialect have numbers: a client has those before this one."""

    def chunks(self, piece: Piece) -> Iterable[Struct]:
        """The events of a piece."""
        raise NotImplementedError

    def ending(self, finished: Finished) -> Iterable[Struct]:
        """The events after the last piece."""
        raise NotImplementedError

    def failure(self, status: int, error: ErrorBody) -> Struct:
        """The last event of a stream that fails."""
        return ErrorAnswer(error)

    def add(self, piece: Piece) -> None:
        """Collects a piece for the whole answer."""
        for _ in self.chunks(piece):
            pass

    def whole(self, finished: Finished) -> Any:
        raise NotImplementedError


class Dialect:
    """One endpoint for text: how it reads a body, answers and refuses."""

    named_events = False
    """Events carry the name that their field `type` has. Without names, `[DONE]` ends a stream."""

    def read(self, data: bytes, tenant: str) -> tuple[Asked, Options, Sequence[Prompt]]:
        """Reads a body and checks all that needs no model, on any thread. Raises InvalidRequestError."""
        raise NotImplementedError

    def fit(
        self, frontend: Frontend, call: Call, form: Any, prompts: Sequence[Prompt]
    ) -> tuple[Call, Sequence[Prompt]]:
        """What is asked of the model, where that depends on what it can. `form`: see Asked. Raises
        InvalidRequestError."""
        return call, prompts

    def answer(
        self, frontend: Frontend, asked: Asked, options: Options, request_id: str, requests: Sequence[GenerateRequest]
    ) -> Answer:
        """`frontend`: the model that was asked for."""
        raise NotImplementedError

    def error(self, status: int, error: ErrorBody, request_id: str) -> Struct:
        """The body of a refusal."""
        return openai_form(status, error, request_id)
