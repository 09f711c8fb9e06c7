"""What is counted of requests: each event in a request's life is told here once, and the router's counters follow."""

import time
from typing import Self

import structlog

from baton_proto.placement_words import PLACED
from baton_proto.routers.router_report import bucket_of
from baton_proto.timeline import Timeline
from baton_proto.worker import Handoff
from router.counters.metrics import OUTCOMES, RouterMetrics, first_fit
from router.counters.recent import Attempt, RecentRequest, Service
from router.counters.usage import NOBODY, Payer
from router.placement.assignment import Assignment
from router.placement.cost import SHORT
from router.placement.placement import Placement

log = structlog.get_logger()


class Tally(Service):
    """One choice of a request, which is a request of its own to the workers."""

    __slots__ = ("_metrics", "_prompt_tokens")

    def __init__(self, metrics: RouterMetrics, index: int, prompt_tokens: int) -> None:
        now = time.monotonic()
        super().__init__(index, arrived_s=now, first_s=now, last_s=now)
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        metrics.totals.arrivals += 1
        metrics.totals.input_tokens += prompt_tokens
        metrics.totals.input_tokens_squared += float(prompt_tokens) ** 2

    def attempt(self) -> None:
        """An attempt begins."""
        self.attempts += 1
        self.tried.append(Attempt(self.attempts, time.monotonic(), self.output_tokens))

    def placed(self, assignment: Assignment, waited_s: float, placing_s: float = 0.0) -> None:
        """An attempt has got workers."""
        attempt = self.tried[-1]
        attempt.placed_s, attempt.placing_s = time.monotonic(), placing_s
        attempt.decode_worker = assignment.link.worker[0]
        attempt.prefill_worker = assignment.prefill.worker_id if assignment.prefill else ""
        self.decode_worker = assignment.link.worker[0]
        self.prefill_worker = assignment.prefill.worker_id if assignment.prefill else ""
        self._metrics.placements[PLACED[assignment.placement.reason]] += 1
        self._metrics.queue_wait_s.observe(waited_s)

    def prompt_done(
        self, placement: Placement, cached_tokens: int, handoff: Handoff | None, timeline: Timeline | None = None
    ) -> None:
        """An attempt's prompt is computed, `cached_tokens` of it were cached. Only the first attempt's count: a replay
        finds its own prompt cached."""
        attempt = self.tried[-1]
        attempt.first_s, attempt.timeline = time.monotonic(), timeline
        self._metrics.ttft_error_s.observe(abs(attempt.first_s - attempt.placed_s - placement.ttft_ms / 1e3))
        if not self.started:
            self.started = True
            self.cached_tokens = min(cached_tokens, self._prompt_tokens)
            totals = self._metrics.totals
            totals.started += 1
            totals.local_prefills += placement.reason == SHORT
            totals.started_tokens += self._prompt_tokens
            totals.cached_tokens += self.cached_tokens
            flow = self._metrics.flows[placement.prefill or placement.decode]
            flow.prompt_tokens += self._prompt_tokens
            flow.cached_tokens += self.cached_tokens
        if handoff is not None:
            self.prefill_worker = handoff.prefill_worker
            self.kv_blocks += handoff.kv_blocks
            self.kv_bytes += handoff.kv_bytes
            self.transport = attempt.transport = handoff.transport
            self._metrics.recent.handed_over(self.decode_worker, handoff)

    def output(self, assignment: Assignment, num_tokens: int) -> None:
        """Tokens have come from the decode worker."""
        now = time.monotonic()
        if not self.output_tokens:
            self.first_s = now
            self._metrics.ttft_s.observe(now - self.arrived_s)
            self._metrics.totals.ttft[bucket_of((now - self.arrived_s) * 1e3)] += 1
        else:
            self._metrics.itl_s.observe((now - self.last_s) / max(1, num_tokens))
        self.last_s = now
        self.output_tokens += num_tokens
        self._metrics.streamed_tokens += num_tokens
        self._metrics.flows[assignment.link.worker].output_tokens += num_tokens

    def worker_lost(self, reason: str) -> None:
        self._metrics.failovers += 1
        self.attempt_ended(reason)

    def attempt_ended(self, problem: str) -> None:
        """`problem`: why the attempt did not finish; empty when it did, or the whole choice ended with it."""
        if self.tried and not (attempt := self.tried[-1]).ended_s:
            attempt.ended_s, attempt.output_after, attempt.problem = time.monotonic(), self.output_tokens, problem

    def ended(self) -> None:
        """However it ended. An answer without a token counts nowhere."""
        self.attempt_ended("")
        if not self.output_tokens:
            return
        self._metrics.totals.finished += 1
        self._metrics.totals.output_tokens += self.output_tokens
        if self.output_tokens > 1:
            decode_s = self.last_s - self.first_s
            self._metrics.totals.itl[bucket_of(decode_s * 1e3 / (self.output_tokens - 1))] += 1


class RequestTally(RecentRequest):
    """A request with all its choices. Use `with`: the request has ended when the block is left."""

    __slots__ = ("_metrics", "_payer")

    def __init__(self, metrics: RouterMetrics, request_id: str, prompt_tokens: int, payer: Payer = NOBODY) -> None:
        super().__init__(request_id, prompt_tokens, time.monotonic(), key=payer.key)
        self._metrics, self._payer = metrics, payer
        metrics.recent.requests.append(self)
        if metrics.recent.on_request is not None:
            metrics.recent.on_request(self)

    def choice(self, index: int) -> Tally:
        choice = Tally(self._metrics, index, self.prompt_tokens)
        self.choices.append(choice)
        return choice

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that no choice had to compute: usage counts the prompt once, whatever the number of choices."""
        return min((choice.cached_tokens for choice in self.choices), default=0)

    @property
    def output_tokens(self) -> int:
        return sum(choice.output_tokens for choice in self.choices)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        metrics, self.outcome, self.ended_s = self._metrics, first_fit(error, OUTCOMES), time.monotonic()
        duration_s = self.ended_s - self.arrived_s
        duration_ms = round(duration_s * 1000, 1)
        computed = self.prompt_tokens if any(choice.started for choice in self.choices) else 0
        tokens = computed, self.cached_tokens, self.output_tokens
        metrics.requests[self.outcome] += 1
        metrics.usage.add(self._payer, self.request_id, self.outcome, tokens, duration_ms)
        metrics.duration_s.observe(duration_s)
        log.info(
            "request ended",
            request_id=self.request_id,
            outcome=self.outcome,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            duration_ms=duration_ms,
            decode=[choice.decode_worker for choice in self.choices],
            prefill=[choice.prefill_worker for choice in self.choices],
            **({"by": self.key} if self.key else {}),
        )
