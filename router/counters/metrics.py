"""What the router counts of its requests, for Prometheus. What is read at a scrape is in `router/views/gauges.py`."""

from collections import Counter
from typing import Final

from prometheus_client import Histogram, generate_latest

from baton_proto.placement_words import PLACED
from runtime.errors import (
    BodyTooLargeError,
    ContextLengthError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    UnknownModelError,
)
from runtime.telemetry.metrics import ProcessMetrics, Read

LATENCY_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
INTERVAL_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0)
OUTCOMES = ("completed", "cancelled", "invalid", "overloaded", "unavailable", "deadline", "failed")
REFUSALS: Final[dict[type[Exception], str]] = {  # the first that fits
    UnknownModelError: "unknown_model",
    ContextLengthError: "context_length",
    BodyTooLargeError: "body_too_large",
    InvalidRequestError: "invalid",
    OverloadedError: "overloaded",
    UnavailableError: "unavailable",
}


class RouterMetrics(ProcessMetrics):
    """Counts are plain numbers of the event loop's, which also answers the scrape."""

    def __init__(self) -> None:
        super().__init__()
        self.failovers = 0
        self.placements: Counter[str] = Counter(dict.fromkeys(PLACED.values(), 0))
        self._requests: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._refusals: Counter[str] = Counter(dict.fromkeys(REFUSALS.values(), 0))
        self._responses: Counter[tuple[str, str]] = Counter()
        self._prompt_tokens = self._cached_tokens = self._output_tokens = 0
        self._count()
        self.queue_wait_s = self._distribution("queue_wait", "An attempt's wait for workers", LATENCY_BUCKETS_S)
        self.ttft_s = self._distribution(
            "time_to_first_token", "Arrival to the first token, of each choice", LATENCY_BUCKETS_S
        )
        self.itl_s = self._distribution(
            "inter_token_latency", "Time per output token after the first piece", INTERVAL_BUCKETS_S
        )
        self.duration_s = self._distribution(
            "request_duration", "Arrival to the end, of each request", LATENCY_BUCKETS_S
        )

    def request_ended(
        self, outcome: str, prompt_tokens: int, output_tokens: int, cached_tokens: int, duration_s: float
    ) -> None:
        self._requests[outcome] += 1
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += cached_tokens
        self._output_tokens += output_tokens
        self.duration_s.observe(duration_s)

    def answered(self, api: str, code: str, error: Exception | None = None) -> None:
        """`code`: the status that the caller has got; a caller who left gets none."""
        self._responses[api, code] += 1
        if error is None:
            return
        for kind, reason in REFUSALS.items():
            if isinstance(error, kind):
                self._refusals[reason] += 1
                return

    def exposition(self) -> bytes:
        """What a scrape gets, in Prometheus' text format."""
        return generate_latest(self.registry)

    def _count(self) -> None:
        def counter(name: str, what: str, read: Read, *labels: str) -> None:
            self.counter(f"baton_router_{name}", what, read, *labels)

        def each(counts: Counter[str]) -> Read:
            return lambda: [((label,), count) for label, count in counts.items()]

        counter(
            "requests",
            "Requests that have ended, of those that were not refused at once",
            each(self._requests),
            "outcome",
        )
        counter("refusals", "Requests that were refused, at once or later", each(self._refusals), "reason")
        counter("placements", "Attempts, by where the prompt runs and why", each(self.placements), "reason")
        counter("responses", "Answers to requests for text, by status", self._responses.items, "api", "code")
        counter("prompt_tokens", "Prompt tokens of ended requests", lambda: self._prompt_tokens)
        counter("cached_tokens", "Prompt tokens that no worker had to compute", lambda: self._cached_tokens)
        counter("output_tokens", "Output tokens of ended requests", lambda: self._output_tokens)
        counter("failovers", "Attempts that lost a worker", lambda: self.failovers)

    def _distribution(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"baton_router_{name}_seconds", what, buckets=buckets, registry=self.registry)
