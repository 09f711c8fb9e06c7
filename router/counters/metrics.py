"""What the router counts of its requests: for Prometheus, `baton status` and the planner. tally.py does the counting;
what others keep and a scrape reads is in router/views/gauges.py."""

from collections import Counter, defaultdict
from functools import partial
from types import NoneType
from typing import Final

from prometheus_client import generate_latest

from baton_proto.placement_words import PLACED
from baton_proto.routers.router_report import BUCKETS, RouterTotals
from baton_proto.token_counts import TOKEN_COUNTS, TokenCounts
from router.counters.recent import Recent
from router.counters.usage import Payer, Usage
from runtime.discovery.worker_key import WorkerKey
from runtime.errors import (
    BodyTooLargeError,
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    TooLateError,
    UnavailableError,
    UnknownModelError,
)
from runtime.security.failed_logins import FailedLogins
from runtime.telemetry.metrics import Distribution, ProcessMetrics, Read

LATENCY_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
INTERVAL_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0)
OUTCOMES: Final[dict[type, str]] = {  # by what ended the request; the first that fits
    NoneType: "completed",
    InvalidRequestError: "invalid",
    OverloadedError: "overloaded",
    UnavailableError: "unavailable",
    DeadlineError: "deadline",
    Exception: "failed",
    BaseException: "cancelled",  # the caller has closed the iterator, or was cancelled
}
REFUSALS: Final[dict[type, str]] = {  # the first that fits
    UnknownModelError: "unknown_model",
    ContextLengthError: "context_length",
    BodyTooLargeError: "body_too_large",
    InvalidRequestError: "invalid",
    TooLateError: "too_late",
    OverloadedError: "overloaded",
    UnavailableError: "unavailable",
}


ENDED: Final = (  # what TOKEN_COUNTS are of the requests that have ended
    "Prompt tokens of ended requests that a worker has run",
    "Prompt tokens that no worker had to compute",
    "Output tokens of ended requests",
)


class ApiMetrics(ProcessMetrics):
    """Counts of what callers were answered, whichever model they asked for."""

    def __init__(self, of_process: bool = True) -> None:
        super().__init__(of_process)
        self.logins = FailedLogins()
        self._refusals: Counter[str] = Counter(dict.fromkeys(REFUSALS.values(), 0))
        self._responses: Counter[tuple[str, str]] = Counter()
        if of_process:
            refused = "Requests that were refused, at once or later"
            self.counter("baton_router_refusals", refused, _each(self._refusals), "reason")
            answers = "Answers to requests for text, by status"
            self.counter("baton_router_responses", answers, self._responses.items, "api", "code")
            wrong = "Calls that showed a wrong key"
            self.counter("baton_router_failed_logins", wrong, self.logins.counts.items, "api", "key")

    def answered(self, api: str, code: str, error: Exception | None = None) -> None:
        """`code`: the status that the caller has got; a caller who left gets none."""
        self._responses[api, code] += 1
        if reason := first_fit(error, REFUSALS):
            self._refusals[reason] += 1

    def exposition(self) -> bytes:
        """What a scrape gets, in Prometheus' text format."""
        return generate_latest(self.registry)


class RouterMetrics(ApiMetrics):
    """Counts of the event loop's, which also answers the scrape. All of them rise from the router's start.
    `of_process` False: of one model beside others, for which another object counts what callers were answered."""

    def __init__(self, of_process: bool = True) -> None:
        super().__init__(of_process)
        self.totals = RouterTotals(ttft=[0] * BUCKETS, itl=[0] * BUCKETS)  # what the planner wants to know
        self.streamed_tokens = 0  # output of all choices, as it comes
        self.placements: Counter[str] = Counter(dict.fromkeys(PLACED.values(), 0))  # of attempts
        self.failovers = 0
        self.recent = Recent()
        self.flows: defaultdict[WorkerKey, TokenCounts] = defaultdict(TokenCounts)  # of prompts that began, and output
        self.requests: Counter[str] = Counter(dict.fromkeys(OUTCOMES.values(), 0))  # that have ended
        self.usage = Usage()  # of ended requests
        self._expose(Payer._fields if of_process else Payer._fields[:-1])  # the model is every line's label there
        self.queue_wait_s = self._distribution("queue_wait", "An attempt's wait for workers", LATENCY_BUCKETS_S)
        self.ttft_s = self._distribution(
            "time_to_first_token", "Arrival to the first token, of each choice", LATENCY_BUCKETS_S
        )
        self.ttft_error_s = self._distribution(
            "time_to_first_token_error", "How far off what placement expected was, of each attempt", LATENCY_BUCKETS_S
        )
        self.itl_s = self._distribution(
            "inter_token_latency", "Time per output token after the first piece", INTERVAL_BUCKETS_S
        )
        self.duration_s = self._distribution(
            "request_duration", "Arrival to the end, of each request", LATENCY_BUCKETS_S
        )

    def forget(self, worker: WorkerKey) -> None:
        """The worker is gone. A request that still streams from it makes it known again, with a handful of bytes."""
        self.flows.pop(worker, None)

    def _expose(self, payers: tuple[str, ...]) -> None:
        def counter(name: str, what: str, read: Read, *labels: str) -> None:
            self.counter(f"baton_router_{name}", what, read, *labels)

        ended = "Requests that have ended, of those that were not refused at once"
        counter("requests", ended, _each(self.requests), "outcome")
        counter("placements", "Attempts, by where the prompt runs and why", _each(self.placements), "reason")
        for name, what in zip(TOKEN_COUNTS, ENDED, strict=True):
            counter(name, what, partial(self.usage.of, name, len(payers)), *payers)
        counter("usage_lines_lost", "Lines of logging.usage not written", lambda: self.usage.lines_lost())
        counter("failovers", "Attempts that lost a worker", lambda: self.failovers)

    def _distribution(self, name: str, what: str, buckets: tuple[float, ...]) -> Distribution:
        return self.distribution(f"baton_router_{name}_seconds", what, buckets)


def _each(counts: Counter[str]) -> Read:
    return lambda: [((label,), count) for label, count in counts.items()]


def first_fit(error: BaseException | None, table: dict[type, str]) -> str:
    """The name of an error in a table of types; empty when none fits."""
    return next((name for kind, name in table.items() if isinstance(error, kind)), "")
