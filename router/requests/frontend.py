"""What the gRPC and the HTTP API need of the rest of the router: of each model, and of all together."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from msgspec import Struct

from baton_proto.grammar import Grammar
from router.parsing.parsing import NO_FAMILIES, ModelFamilies
from router.requests.body_budget import BodyBudget, Hold
from router.requests.rate_limits import RateLimits
from router.requests.request import Finished, GenerateRequest, Piece
from router.text.tokenizer import Tokenizer
from router.workers.left_answers import Recall, nobody_recalls
from runtime.blocks.block_hash import salted_seed
from runtime.config.serving import RouterConfig
from runtime.errors import InvalidRequestError, UnknownModelError
from runtime.side_lane import SideLane

ModelState = Literal["ready", "asleep", "waking", "not ready"]


class Limits(Struct, frozen=True):
    """How long a request may be, in tokens of prompt and output together."""

    max_model_len: int  # what the model takes
    pool_tokens: int | None = None  # what the roomiest worker takes; None: no worker is known
    away_tokens: int = 0  # what a worker takes that is expected back
    tasks: frozenset[str] = frozenset()  # see pooling, that workers have; empty: no worker is known
    dimension: int = 0  # of embeddings; 0: there are none
    output: int = 1  # tokens that follow a prompt at least

    @property
    def longest(self) -> int:
        """A longer request is refused."""
        roomiest = max(self.pool_tokens or 0, self.away_tokens)
        return min(self.max_model_len, roomiest or self.max_model_len)


class Generator(Protocol):
    def generate(self, request: GenerateRequest) -> AsyncGenerator[Piece | Finished, None]:
        """Pieces, in order per choice, then one Finished. Raises BatonError, as a rule before the first piece.
        Closing the iterator (it is an async generator) or cancelling its consumer ends the work everywhere."""

    def limits(self) -> Limits: ...


class GrammarCheck(Protocol):
    """Runtime's GrammarChecker; where callers are trusted, a GrammarCompiler."""

    async def check_soon(
        self, grammar: Grammar, name: str, deadline_s: float | None = None, lane: SideLane | None = None
    ) -> Grammar:
        """Checks a grammar, see GrammarChecker."""


FetchImage = Callable[[str, str, Hold], Awaitable[tuple[str, bytes]]]
"""(the caller's name of the field, address of an image) -> (content type, bytes), see ImageFetcher."""


async def nobody_fetches(where: str, address: str, held: Hold) -> tuple[str, bytes]:
    problem = "is an address, and router.image_hosts is empty: name its host there, or send the image as a data URL"
    raise InvalidRequestError(where, problem)


@dataclass(frozen=True, slots=True)
class Frontend:
    """One model, or an adapter of one."""

    model: str  # the name that clients use
    created_s: int  # Unix time
    tokenizer: Tokenizer
    generator: Generator
    not_ready: Callable[[], str | None]  # why no request can be served now (no worker, draining); None: ready
    bodies: BodyBudget  # of HTTP; gRPC messages have as much again, see router/api/grpc/receiving.py
    config: RouterConfig = field(default_factory=RouterConfig)
    cache_salt: str = ""  # engine.cache_salt
    cache_per_tenant: bool = False  # engine.cache_per_tenant
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)  # see router/api/wishes/sampling_options.py
    grammars: GrammarCheck | None = None  # None: a grammar is refused
    families: ModelFamilies = NO_FAMILIES  # how the model writes tool calls and reasoning
    grammar_lane: SideLane | None = None  # None: that of `grammars`
    rate_limits: RateLimits = field(default_factory=RateLimits)
    lane: SideLane = field(default_factory=SideLane)
    recall: Recall = nobody_recalls  # tokens of answers that were left
    fetch_image: FetchImage = nobody_fetches
    answered: Callable[[str, str, Exception | None], None] = lambda api, code, error: None  # see RouterMetrics
    state: Callable[[], ModelState] = lambda: "ready"
    aliases: Sequence[str] = ()  # other names that clients use
    adapters: Callable[[], Collection[str]] = tuple  # those of the model that can be asked for
    parent: str = ""  # this is an adapter of the model of that name, and `model` is the adapter's

    @property
    def adapter(self) -> str:
        return self.model if self.parent else ""

    @property
    def base(self) -> str:
        """The model, whether or not this is an adapter of it."""
        return self.parent or self.model

    def adapted(self, adapter: str) -> "Frontend":
        return replace(self, model=adapter, parent=self.model, aliases=(), adapters=tuple)

    def rests(self) -> bool:
        """Whether a request has to wait for workers that sleep."""
        return self.state() in ("asleep", "waking")

    def hash_seed(self, tenant: str, cache_salt: str) -> int:
        """The seed of a request's block hashes, before its adapter's share."""
        return salted_seed(self.cache_salt, tenant if self.cache_per_tenant else "", cache_salt)


class Models:
    """The models of the service by name, and what their requests share. Nothing else chooses a model."""

    def __init__(self, models: Sequence[Frontend]) -> None:
        self.all = models
        self._by_name = {name: model for model in models for name in (model.model, *model.aliases)}
        shared = models[0]
        self.bodies, self.lane = shared.bodies, shared.lane
        self.config, self.rate_limits, self.answered = shared.config, shared.rate_limits, shared.answered

    def of(self, name: str | None) -> Frontend:
        """The model that a request names; one that is served alone need not be named. Raises UnknownModelError, and
        InvalidRequestError when none of several is named."""
        if not name and len(self.all) == 1:
            return self.all[0]
        if not name:
            raise InvalidRequestError("model", f"is missing, and several are served: {', '.join(self.names)}")
        if (model := self._by_name.get(name)) is not None:
            return model
        if found := next((model for model in self.all if name in model.adapters()), None):
            return found.adapted(name)
        raise UnknownModelError(name, self.names)

    @property
    def names(self) -> list[str]:
        return [*self._by_name, *(adapter.model for adapter in self._adapters())]

    @property
    def listed(self) -> list[Frontend]:
        """The models, and behind them their adapters."""
        return [*self.all, *self._adapters()]

    def _adapters(self) -> Iterator[Frontend]:
        """Of each model. One whose name is a model's, or another model's adapter's, cannot be asked for."""
        taken = set(self._by_name)
        for model in self.all:
            for name in sorted(set(model.adapters()) - taken):
                taken.add(name)
                yield model.adapted(name)

    def not_ready(self) -> str | None:
        """Why no request can be served now; None: those for one model at least can."""
        problems = [model.not_ready() for model in self.all]
        if None in problems:
            return None
        if len(problems) == 1:
            return problems[0]
        return "; ".join(f"{model.model}: {problem}" for model, problem in zip(self.all, problems, strict=True))
