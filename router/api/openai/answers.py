"""The dialect of both OpenAI endpoints, and what their answers share."""

from collections.abc import Callable, Sequence
from typing import Self

from msgspec import UNSET, Struct, UnsetType

from router.api.dialects.dialect import Answer, Asked, Dialect
from router.api.dialects.json_body import decode_body
from router.api.openai.shown_prompt import NO_WISH, PromptWish, ShownPrompt
from router.api.openai.types import GenerationBody
from router.api.wishes.sampling_options import Options
from router.api.wishes.validation import Chat, Kept, Prompt
from router.requests.frontend import Frontend
from router.requests.request import Finished, GenerateRequest, Piece
from router.text.tokenizer import Tokenizer


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int

    @classmethod
    def of(cls, finished: Finished) -> Self:
        return cls(finished.tokens.cached_tokens)


class CompletionTokensDetails(Struct, frozen=True):
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int | UnsetType = UNSET


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class Told(Struct, frozen=True):
    """What a body says of how its answer is told."""

    as_ids: bool = False  # the tokens of log-probabilities are told by their ids
    reasoning: bool = True
    begun: str = ""  # the message of a chat that the answer goes on from, where the answer shows it, too


class Heading(Struct, frozen=True):
    """First fields of every answer and chunk."""

    id: str
    model: str
    created: int


class Wanted(Struct, frozen=True):
    """The parts that an answer has to tell."""

    num_choices: int
    logprobs: bool = False
    usage: bool = False  # at the end of a stream
    prompt_lengths: Sequence[int] = ()  # tokens of each; empty: the chunks of a stream tell no usage so far
    prompts: Sequence[Sequence[int]] = ()  # the token ids of each; empty: no token ids are told
    shown: Sequence[ShownPrompt] = ()  # one per choice; empty: prompts are not shown
    told: Told = Told()

    def prompt_of(self, index: int) -> Sequence[int]:
        """The prompt of a choice."""
        return self.prompts[index * len(self.prompts) // self.num_choices]

    def prompt_length_of(self, index: int) -> int:
        return self.prompt_lengths[index * len(self.prompt_lengths) // self.num_choices]


class RunningUsage:
    """The usage in each chunk of a stream but the last: none, null, or how far the choice has come."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._none: UnsetType | None = None if wanted.usage else UNSET
        self._num_told = [0] * wanted.num_choices  # tokens

    def add(self, piece: Piece) -> None:
        if self._wanted.prompt_lengths:
            self._num_told[piece.index] += len(piece.token_ids)

    def of(self, index: int) -> Usage | UnsetType | None:
        if not self._wanted.prompt_lengths:
            return self._none
        num_prompt, num_told = self._wanted.prompt_length_of(index), self._num_told[index]
        return Usage(num_prompt, num_told, num_prompt + num_told)


Make = Callable[[Heading, Tokenizer, Wanted], Answer]


class _Form(Struct, frozen=True):
    """The facts of a request that its answer needs."""

    include_usage: bool
    running_usage: bool
    token_ids: bool
    wish: PromptWish
    texts: Sequence[str | None]  # of the prompts; None: given as tokens, or a chat
    told: Told


class OpenAIDialect(Dialect):
    """One of the two endpoints, which differ in their types alone."""

    def __init__(self, body: type[GenerationBody], answer: Make, prefix: str) -> None:
        """`prefix`: of the answer's id."""
        self._body = body
        self._answer = answer
        self._prefix = prefix

    def read(self, data: bytes, tenant: str) -> tuple[Asked, Options, Sequence[Prompt]]:
        """Raises InvalidRequestError."""
        body = decode_body(data, self._body)
        options, prompts = body.options(), body.prompts()
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        told = Told(bool(body.return_tokens_as_token_ids), body.with_reasoning, _begun(prompts) if body.echo else "")
        form = _Form(body.include_usage, body.running_usage, bool(body.return_token_ids), body.wish(), texts, told)
        kept = Kept(body.truncate_prompt_tokens, body.truncation_side)
        return body.asked(body.prompt_field, form, body.add_special_tokens is not False, kept), options, prompts

    def answer(
        self, frontend: Frontend, asked: Asked, options: Options, request_id: str, requests: Sequence[GenerateRequest]
    ) -> Answer:
        created_s = requests[0].draw.created_s
        heading = Heading(f"{self._prefix}-{request_id}", frontend.model, created_s)
        form: _Form = asked.form
        num_choices = sum(len(request.sampling) for request in requests)
        prompts = [request.prompt.tolist() for request in requests] if form.token_ids else []
        shown = [] if form.wish is NO_WISH else _shown(frontend.tokenizer, form, requests)
        lengths = [len(request.prompt) for request in requests] if form.running_usage else []
        wanted = Wanted(
            num_choices, "logprobs" in options.given, form.include_usage, lengths, prompts, shown, form.told
        )
        return self._answer(heading, frontend.tokenizer, wanted)


def _shown(tokenizer: Tokenizer, form: _Form, requests: Sequence[GenerateRequest]) -> Sequence[ShownPrompt]:
    """The prompts to show, one per choice."""
    return [
        ShownPrompt(tokenizer, request.prompt, text, form.wish, form.told.as_ids)
        for request, text in zip(requests, form.texts, strict=True)
        for _ in request.sampling
    ]


def _begun(prompts: Sequence[Prompt]) -> str:
    """The message of the assistant that ends a chat; empty: there is none."""
    last = prompts[0].messages[-1:] if isinstance(prompts[0], Chat) else ()
    return "".join(str(message["content"]) for message in last if message["role"] == "assistant")


def usage_of(finished: Finished) -> Usage:
    tokens, details = finished.tokens, PromptTokensDetails.of(finished)
    accepted = finished.accepted_tokens
    of_completion = CompletionTokensDetails(accepted_prediction_tokens=accepted) if accepted else UNSET
    return Usage(tokens.prompt_tokens, tokens.output_tokens, finished.total_tokens, details, of_completion)
