"""What is counted of requests: each event in a request's life is told here once, and the router's counters follow."""

import time
from typing import Self

import structlog
from msgspec.structs import asdict

from baton_proto.placement_words import PLACED
from baton_proto.routers.router_report import bucket_of
from baton_proto.timeline import Timeline
from baton_proto.token_counts import TokenCounts
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
        self.tried.append(Attempt(self.attempts, time.monotonic(), self.tokens.output_tokens))

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
        self, placement: Placement, tokens: TokenCounts, handoff: Handoff | None, timeline: Timeline | None = None
    ) -> None:
        """An attempt's prompt is computed, at the cost that `tokens` tells. Only the first attempt's count: a replay
        finds its own prompt cached."""
        attempt = self.tried[-1]
        attempt.first_s, attempt.timeline = time.monotonic(), timeline
        self._metrics.ttft_error_s.observe(abs(attempt.first_s - attempt.placed_s - placement.ttft_ms / 1e3))
        if not self.started:
            self.started = True
            totals, prompt = self._metrics.totals, tokens.of_prompt(self._prompt_tokens)
            totals.started += 1
            totals.local_prefills += placement.reason == SHORT
            for counts in self.tokens, totals, self._metrics.flows[placement.prefill or placement.decode]:
                counts.add(prompt)
        if handoff is not None:
            self.prefill_worker = handoff.prefill_worker
            self.kv_blocks += handoff.kv_blocks
            self.kv_bytes += handoff.kv_bytes
            self.transport = attempt.transport = handoff.transport
            self._metrics.recent.handed_over(self.decode_worker, handoff)

    def output(self, assignment: Assignment, num_tokens: int) -> None:
        """Tokens have come from the decode worker."""
        now = time.monotonic()
        if not self.tokens.output_tokens:
            self.first_s = now
            self._metrics.ttft_s.observe(now - self.arrived_s)
            self._metrics.totals.ttft[bucket_of((now - self.arrived_s) * 1e3)] += 1
        else:
            self._metrics.itl_s.observe((now - self.last_s) / max(1, num_tokens))
        self.last_s = now
        self.tokens.output_tokens += num_tokens
        self._metrics.streamed_tokens += num_tokens
        self._metrics.flows[assignment.link.worker].output_tokens += num_tokens

    def worker_lost(self, reason: str) -> None:
        self._metrics.failovers += 1
        self.attempt_ended(reason)

    def attempt_ended(self, problem: str) -> None:
        """`problem`: why the attempt did not finish; empty when it did, or the whole choice ended with it."""
        if self.tried and not (attempt := self.tried[-1]).ended_s:
            attempt.ended_s, attempt.problem = time.monotonic(), problem
            attempt.output_after = self.tokens.output_tokens

    def ended(self) -> None:
        """However it ended. An answer without a token counts nowhere."""
        self.attempt_ended("")
        if not (num_tokens := self.tokens.output_tokens):
            return
        totals = self._metrics.totals
        totals.finished += 1
        totals.output_tokens += num_tokens
        if num_tokens > 1:
            totals.itl[bucket_of((self.last_s - self.first_s) * 1e3 / (num_tokens - 1))] += 1


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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        metrics, self.outcome, self.ended_s = self._metrics, first_fit(error, OUTCOMES), time.monotonic()
        duration_s = self.ended_s - self.arrived_s
        duration_ms = round(duration_s * 1000, 1)
        tokens = self.tokens
        used = tokens if any(choice.started for choice in self.choices) else TokenCounts()
        metrics.requests[self.outcome] += 1
        metrics.usage.add(self._payer, self.request_id, self.outcome, used, duration_ms)
        metrics.duration_s.observe(duration_s)
        log.info(
            "request ended",
            request_id=self.request_id,
            outcome=self.outcome,
            **asdict(tokens),
            duration_ms=duration_ms,
            decode=[choice.decode_worker for choice in self.choices],
            prefill=[choice.prefill_worker for choice in self.choices],
            **({"by": self.key} if self.key else {}),
        )
