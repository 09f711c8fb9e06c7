"""Prompts and chats of a Python caller, through the checks that the service's requests pass."""

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

import msgspec

from baton.client.request import has_order
from baton.in_process.sampling_params import SamplingParams
from baton_proto.sampling import MAX_SEED
from router.api.openai.fields import ChatMessage
from router.api.wishes.sampling_options import NO_DEFAULTS, Options
from router.api.wishes.validation import Call, Chat, Prompt, validate
from router.requests.body_budget import BodyBudget
from router.requests.frontend import Frontend, Limits
from router.requests.request import Finished, GenerateRequest, Piece
from router.text.tokenizer import Tokenizer
from runtime.errors import ContextLengthError, InvalidRequestError
from runtime.grammar.compiler import GrammarCompiler
from runtime.side_lane import SideLane

PROMPT = "must be a text or token ids"
PROMPTS = f"{PROMPT}, or a list of either"
CHAT = "must be a list of messages"
CHATS = f"{CHAT}, or of such lists"

P = ParamSpec("P")
T = TypeVar("T")

Prompts: TypeAlias = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
Messages: TypeAlias = Sequence[Mapping[str, Any]]
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None


class PromptReader:
    def __init__(
        self,
        tokenizer: Tokenizer,
        max_model_len: int,
        way_out: str,
        cache_salt: str,
        sampling_defaults: Mapping[str, Any] = NO_DEFAULTS,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """`way_out`: what allows more than `max_model_len` tokens; follows the sentence that refuses them.
        sampling_defaults: for prompts without `params`."""
        self._way_out = way_out
        self._frontend = Frontend(
            model="",
            created_s=0,
            tokenizer=tokenizer,
            generator=_NoService(Limits(max_model_len)),
            not_ready=lambda: None,
            bodies=BodyBudget(0),
            cache_salt=cache_salt,
            sampling_defaults=sampling_defaults,
            lane=_InPlace(),
            grammars=grammars,
            grammar_lane=_InPlace(),
        )

    def prompts(self, prompts: Prompts, params: Params) -> list[GenerateRequest]:
        """Raises InvalidRequestError that names the prompt or the parameter."""
        given = prompts if isinstance(prompts, str) else _listed("prompts", prompts, PROMPTS)
        if isinstance(given, str) or (len(given) and _is_number(given[0])):
            return self._requests([given], ["prompts"], params)
        names = [f"prompts[{i}]" for i in range(len(given))]
        each = [
            one if isinstance(one, str) else _listed(name, one, PROMPT) for name, one in zip(names, given, strict=True)
        ]
        return self._requests(each, names, params)

    def chats(
        self, chats: Messages | Sequence[Messages], params: Params, variables: Mapping[str, Any] | None
    ) -> list[GenerateRequest]:
        """Raises InvalidRequestError that names the message or the parameter."""
        given = _listed("messages", chats, CHATS)
        if not given or isinstance(given[0], Mapping):
            each, names = [given], ["messages"]
        else:
            names = [f"messages[{i}]" for i in range(len(given))]
            each = [_listed(name, chat, CHAT) for name, chat in zip(names, given, strict=True)]
        size = len(msgspec.json.encode(variables or {}))
        read = [Chat(_plain(chat, name), variables or {}, size) for chat, name in zip(each, names, strict=True)]
        return self._requests(read, names, params)

    def _requests(self, prompts: Sequence[Prompt], names: list[str], params: Params) -> list[GenerateRequest]:
        """One `params` for all: prompt i draws with seed + i, as choice i of a request does."""
        if isinstance(params, Sequence) and not isinstance(params, str):
            if len(params) != len(prompts):
                raise InvalidRequestError("params", f"has {len(params)} entries for {len(prompts)} prompts")
            every = [_options(f"params[{i}]", each) for i, each in enumerate(params)]
            shifts = [0] * len(prompts)
        else:
            every = [Options(given={}) if params is None else _options("params", params)] * len(prompts)
            shifts = list(range(len(prompts)))
        requests = []
        for prompt, name, options, shift in zip(prompts, names, every, shifts, strict=True):
            call = Call(request_id="", prompt_field=name)
            try:
                request = _at_once(validate(self._frontend, call, prompt, options))
            except ContextLengthError as error:
                raise ContextLengthError(error.field, f"{error.problem}{self._way_out}") from None
            if request.images:
                raise InvalidRequestError(name, "have images: vLLM takes them, behind a service")
            (sampling,) = request.sampling
            sampling = msgspec.structs.replace(sampling, seed=(sampling.seed + shift) & MAX_SEED)
            requests.append(msgspec.structs.replace(request, sampling=(sampling,)))
        return requests


def _listed(name: str, given: Any, form: str) -> Sequence[Any]:
    """Returns what has an order, arrays and tensors too; refuses others and names the form that is wanted."""
    if isinstance(given, str) or not isinstance(given, Iterable) or not has_order(given):
        raise InvalidRequestError(name, f"{form}, not {type(given).__name__}")
    return given if hasattr(given, "__getitem__") else list(given)  # type: ignore[return-value]  # arrays suffice


def _is_number(value: Any) -> bool:
    """True for a number of any library; an array of one number is none."""
    return hasattr(value, "__index__") and not getattr(value, "ndim", 0)


def _options(name: str, params: Any) -> Options:
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(name, f"must be SamplingParams, not {type(params).__name__}")
    return params.options()


def _plain(chat: Any, name: str) -> list[Mapping[str, Any]]:
    messages = []
    for place, message in enumerate(chat):
        where = f"{name}[{place}]"
        try:
            messages.append(msgspec.convert(message, ChatMessage).plain(where))
        except msgspec.ValidationError as error:
            raise InvalidRequestError(where, str(error)) from None
    return messages


class _NoService:
    """Stands in for a service: the checks ask only how long a request may be."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def limits(self) -> Limits:
        return self._limits

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Piece | Finished, None]:
        raise NotImplementedError


class _InPlace(SideLane):
    """Long prompts are read where they are given: nobody else waits."""

    async def run(self, deadline_s: float | None, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return work(*args, **kwargs)


def _at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Invariant: the coroutine waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return cast(T, done.value)
    raise AssertionError("it waits")
