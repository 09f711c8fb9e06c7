"""Rates of what the router's Status counts, from one answer to another."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from baton_proto.generated import inference_pb2 as pb
from baton_proto.token_counts import counts_of

WINDOW_S: Final = 5.0  # that rates are taken over


@dataclass(frozen=True, slots=True)
class WorkerRates:
    prompt_tokens_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    event_batches_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    event_batches_per_s: float
    hit_rate: float | None  # in the window; None: no prompt ran
    workers: Mapping[str, WorkerRates]  # by worker id


class RateWindow:
    """The answers of the last `window_s`, by the router's clock."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._answers: deque[pb.StatusResponse] = deque()

    def add(self, now: pb.StatusResponse) -> Rates:
        """Rates between the oldest answer of the window and `now`. A router that came, left or restarted empties the
        window."""
        answers = self._answers
        if answers and _restarted(answers[-1], now):
            answers.clear()
        answers.append(now)
        while len(answers) > 2 and now.totals.clock_s - answers[0].totals.clock_s > self._window_s:
            answers.popleft()
        return _between(answers[0], now)


def _restarted(before: pb.StatusResponse, now: pb.StatusResponse) -> bool:
    """True when `now` is the view of other routers, or of another life of one, whose counters began at 0 again."""
    return (
        (before.router_id, before.routers) != (now.router_id, now.routers)
        or now.totals.clock_s < before.totals.clock_s
        or now.totals.requests < before.totals.requests
        or now.totals.event_batches < before.totals.event_batches
    )


def _between(before: pb.StatusResponse, now: pb.StatusResponse) -> Rates:
    seconds = now.totals.clock_s - before.totals.clock_s
    known = {(worker.worker_id, worker.incarnation): worker for worker in before.workers}

    def per_s(later: int, earlier: int) -> float:
        return (later - earlier) / seconds if seconds > 0 else 0.0

    def of(worker: pb.WorkerStatus) -> WorkerRates:
        # Counters of a worker that was not there before began at 0.
        earlier = known.get((worker.worker_id, worker.incarnation), pb.WorkerStatus())
        return WorkerRates(
            per_s(worker.prompt_tokens, earlier.prompt_tokens),
            per_s(worker.output_tokens, earlier.output_tokens),
            per_s(worker.event_batches, earlier.event_batches),
        )

    moved = counts_of(now.totals).since(counts_of(before.totals))
    return Rates(
        requests_per_s=per_s(now.totals.requests, before.totals.requests),
        prompt_tokens_per_s=per_s(moved.prompt_tokens, 0),
        output_tokens_per_s=per_s(moved.output_tokens, 0),
        event_batches_per_s=per_s(now.totals.event_batches, before.totals.event_batches),
        hit_rate=moved.hit_rate,
        workers={worker.worker_id: of(worker) for worker in now.workers},
    )
