"""The last requests and KV transfers, remembered for operators: references to what is counted anyway."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from baton_proto.timeline import Timeline
from baton_proto.token_counts import TokenCounts, counts_of_request
from baton_proto.worker import Handoff
from router.placement.decisions import callers_id

MAX_REQUESTS: Final = 1024
MAX_TRIED: Final = 8  # attempts of a choice
MAX_HANDOFFS: Final = 4096  # that nobody has asked for


@dataclass(slots=True)
class Attempt:
    """One attempt at a choice. Times are monotonic; 0: not yet."""

    number: int
    queued_s: float
    output_before: int  # tokens that earlier attempts have brought
    placed_s: float = 0.0
    placing_s: float = 0.0  # seconds that the decision took
    prefill_worker: str = ""
    decode_worker: str = ""
    first_s: float = 0.0
    timeline: Timeline | None = None  # with the first token
    transport: str = ""
    ended_s: float = 0.0
    output_after: int = 0
    problem: str = ""  # why it did not finish


@dataclass(slots=True)
class Service:
    """Who served one choice of a request and when, for usage and for people. Times are monotonic."""

    index: int
    decode_worker: str = ""
    prefill_worker: str = ""
    kv_blocks: int = 0
    kv_bytes: int = 0
    transport: str = ""
    attempts: int = 0
    started: bool = False  # a worker has computed the prompt
    tokens: TokenCounts = field(default_factory=TokenCounts)  # of the prompt: once `started`
    accepted_tokens: int = 0  # of the output: they were guessed before they were computed
    arrived_s: float = 0.0
    first_s: float = 0.0  # of its output; without any, as `arrived_s`
    last_s: float = 0.0
    tried: deque[Attempt] = field(default_factory=lambda: deque(maxlen=MAX_TRIED))  # the last attempts


@dataclass(slots=True)
class RecentRequest:
    request_id: str  # as in the log
    prompt_tokens: int
    arrived_s: float
    choices: list[Service] = field(default_factory=list)
    outcome: str = ""  # a value of OUTCOMES; empty: it runs
    ended_s: float = 0.0
    key: str = ""  # the name of the key that its caller has shown; empty: none is asked for

    @property
    def tokens(self) -> TokenCounts:
        return counts_of_request(self.prompt_tokens, [choice.tokens for choice in self.choices])


class Recent:
    """Invariant: an entry costs an append, because requests and their first tokens make it."""

    def __init__(self) -> None:
        self.requests: deque[RecentRequest] = deque(maxlen=MAX_REQUESTS)
        self._handoffs: deque[tuple[str, Handoff]] = deque(maxlen=MAX_HANDOFFS)
        self.on_request: Callable[[RecentRequest], None] | None = None  # told of each request at its begin, in its task

    def find(self, request_id: str) -> RecentRequest | None:
        """`request_id`: as the caller named it, which means its latest request, or as the log does."""
        known = list(reversed(self.requests))
        return next((one for one in known if one.request_id == request_id), None) or next(
            (one for one in known if callers_id(one.request_id) == request_id), None
        )

    def handed_over(self, decode_worker: str, handoff: Handoff) -> None:
        self._handoffs.append((decode_worker, handoff))

    def take_handoffs(self) -> list[tuple[str, Handoff]]:
        """(decode worker, what it was sent), of those since the last call."""
        taken = list(self._handoffs)
        self._handoffs.clear()
        return taken
