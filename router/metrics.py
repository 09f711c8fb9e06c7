"""What the router counts of its requests, for Prometheus. What is read at a scrape is in `router/gauges.py`."""

from typing import Final

from prometheus_client import Counter, Histogram, generate_latest

from baton.errors import (
    BodyTooLargeError,
    ContextLengthError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    UnknownModelError,
)
from baton.metrics import ProcessMetrics
from router.placement import REASONS

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
    def __init__(self) -> None:
        super().__init__()

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"baton_router_{name}", what, labels, registry=self.registry)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"baton_router_{name}", what, buckets=buckets, registry=self.registry)

        requests = counter("requests", "Requests that have ended, of those that were not refused at once", "outcome")
        refusals = counter("refusals", "Requests that were refused, at once or later", "reason")
        placements = counter("placements", "Attempts, by where the prompt runs and why", "reason")
        self._requests = {outcome: requests.labels(outcome) for outcome in OUTCOMES}
        self._refusals = {kind: refusals.labels(reason) for kind, reason in REFUSALS.items()}
        self.placements = {reason: placements.labels(reason) for reason in REASONS}
        self._responses = counter("responses", "Answers to requests for text, by status", "api", "code")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of ended requests")
        self._cached_tokens = counter("cached_tokens", "Prompt tokens that no worker had to compute")
        self._output_tokens = counter("output_tokens", "Output tokens of ended requests")
        self.failovers = counter("failovers", "Attempts that lost a worker")
        self.queue_wait_s = histogram("queue_wait_seconds", "An attempt's wait for workers", LATENCY_BUCKETS_S)
        self.ttft_s = histogram(
            "time_to_first_token_seconds", "Arrival to the first token, of each choice", LATENCY_BUCKETS_S
        )
        self.itl_s = histogram(
            "inter_token_latency_seconds", "Time per output token after the first piece", INTERVAL_BUCKETS_S
        )
        self.duration_s = histogram(
            "request_duration_seconds", "Arrival to the end, of each request", LATENCY_BUCKETS_S
        )

    def request_ended(
        self, outcome: str, prompt_tokens: int, output_tokens: int, cached_tokens: int, duration_s: float
    ) -> None:
        self._requests[outcome].inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._output_tokens.inc(output_tokens)
        self._cached_tokens.inc(cached_tokens)
        self.duration_s.observe(duration_s)

    def answered(self, api: str, code: str, error: Exception | None = None) -> None:
        """`code`: the status that the caller has got; a caller who left gets none."""
        self._responses.labels(api, code).inc()
        if error is None:
            return
        for kind, refusals in self._refusals.items():
            if isinstance(error, kind):
                refusals.inc()
                return

    def exposition(self) -> bytes:
        """What a scrape gets, in Prometheus' text format."""
        return generate_latest(self.registry)
