"""The workers of one role that a request may go to, and what each of them costs."""

import math
import random
from collections.abc import Sequence
from typing import Final, NamedTuple, cast

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from baton_proto.generated import inference_pb2 as pb
from router.index.match import NONE_LOWER
from router.placement import cost
from router.placement.weights import Weights
from router.workers.account import ACTIVE_BLOCKS, NUM_COLUMNS, QUEUED_TOKENS
from runtime.discovery.worker_key import WorkerKey

NO_LIMIT: Final = 2**62


class Request(Struct, frozen=True, gc=False):
    """What placement must know of a request."""

    num_tokens: int  # prompt and replayed output
    block_size: int
    excluded: frozenset[WorkerKey] = frozenset()  # workers that failed or refused the request
    weights: int = 0  # that the answer was begun with, see weights_tag; 0: it has not begun
    adapter: str = ""  # that a worker needs; empty: none


class Work(NamedTuple):
    """What is to be computed of prompts."""

    tokens: float
    pairs: float  # each of these tokens with each token before it


NO_WORK: Final = Work(0, 0)
NO_RATES: Final = np.empty((0, 2))


class Candidates(NamedTuple):
    """Workers of one role that are ready, as columns."""

    workers: Sequence[WorkerKey]
    cached: NDArray[np.int32]  # [n] blocks of the prompt's prefix that the worker holds
    load: NDArray[np.int64]  # [n, NUM_COLUMNS], see account.py
    times: NDArray[np.float64]  # [n, 6] in ms, in the order of StepTimes' fields
    lower: NDArray[np.int32] = NONE_LOWER  # [2, n] those of `cached` in host memory and on disk, see Match.lower
    now_us: int = 0  # of the ledger's clock
    restoring: NDArray[np.float64] = NO_RATES  # [n, 2] see LoadLedger.restoring; [0, 2]: nobody has measured


NOBODY: Final = np.empty(0, dtype=np.bool_)
NO_CANDIDATES: Final = Candidates(
    (), np.empty(0, dtype=np.int32), np.empty((0, NUM_COLUMNS), dtype=np.int64), np.empty((0, 6))
)
NO_SHIPPER: Final = (math.inf, math.inf)


class Cost(Struct, frozen=True, gc=False):
    """One candidate's cost and the facts behind it."""

    worker: WorkerKey
    role: str  # "prefill" | "decode"
    prompt_blocks: int
    cached_blocks: int
    lower_blocks: tuple[int, ...]  # of these, restored from host memory and from disk; empty: none
    queued_tokens: int  # of prompts
    active_blocks: int
    runs_prompt: bool  # False: a decode worker that would receive the prompt's KV; its queue does not count
    reason: "pb.PlacementReason"  # why the candidate would run the prompt or receive its KV
    barred: "pb.BarredReason"
    terms: tuple[float, ...]  # in ms, in the order of cost.TERMS
    total: float  # in ms
    ttft_ms: float  # until the first token, from now on, as far as is known


def chances(costs: Sequence[Cost], due_ms: float = math.inf) -> list[float]:
    """How likely each of the candidates of one role was to be chosen, before the dice fell."""
    limit_ms = max(due_ms, min((cost.ttft_ms for cost in costs if not cost.barred), default=math.inf))
    totals = [math.inf if cost.barred or cost.ttft_ms > limit_ms else cost.total for cost in costs]
    lowest = min(totals, default=math.inf)
    return [1 / totals.count(lowest) if total == lowest < math.inf else 0.0 for total in totals]


def _knobs(config: Weights) -> cost.Knobs:
    return (
        config.decode_steps,
        config.ship_ms,
        config.ship_token_ms,
        config.host_token_ms,
        config.disk_token_ms,
        config.delay_weight,
        config.crowd_weight,
        config.ttft_ms,
        config.itl_ms,
        config.keep_steps,
    )


class Weighed:
    """The candidates of one role with what each of them costs, and the index of the chosen one; -1: all are barred.
    `keeper`: of the prefill worker that would keep the answer; -1: none."""

    __slots__ = ("_candidates", "_codes", "_costs", "_request", "_role", "chosen", "due_ms", "keeper")

    def __init__(
        self,
        role: str,
        request: Request,
        candidates: Candidates,
        config: Weights,
        rng: random.Random,
        *,
        alone: bool = False,
        shipper: tuple[float, float] = NO_SHIPPER,
        due_ms: float = math.inf,
        max_requests: int = NO_LIMIT,
        max_queued_tokens: int = NO_LIMIT,
    ) -> None:
        """`alone`: a decode worker that is chosen runs the prompt. `shipper`: see `Weighed.shipper` of the prefill
        workers. `max_requests`: whoever has as many takes no answer."""
        self._role, self._request, self._candidates = role, request, candidates
        self.chosen, self.keeper, self.due_ms = -1, -1, due_ms
        workers, cached, load, times, lower, now_us, restoring = candidates
        if not workers:
            return
        n = len(workers)
        excluded = NOBODY
        if request.excluded:
            excluded = np.array([worker in request.excluded for worker in workers])
        self._codes = np.empty((2, n), dtype=np.int8)  # reasons and barred, as `choose` fills them
        self._costs = np.empty((n, cost.NUM_COSTS))
        self.chosen, self.keeper = cost.choose(
            (cached, load, times, excluded, lower, restoring),
            request.num_tokens,
            request.block_size,
            cost.SHIPS if role == "prefill" else cost.MIXED if alone else cost.RECEIVES,
            now_us,
            due_ms,
            shipper,
            (max_requests, max_queued_tokens, config.local_prefill_tokens),
            _knobs(config),
            rng.random(),
            self._codes,
            self._costs,
        )

    @property
    def shipper(self) -> tuple[float, float]:
        """What it costs that the chosen one takes the prompt, and when the first token comes, both in ms."""
        return (
            (self._costs.item(self.chosen, cost.TOTAL), self.ttft_ms(self.chosen)) if self.chosen >= 0 else NO_SHIPPER
        )

    def ttft_ms(self, index: int) -> float:
        return self._costs.item(index, cost.TTFT)

    def rank(self, index: int, due_ms: float, column: int = cost.TOTAL) -> tuple[float, float]:
        """(how late, the cost), both in ms. The lowest is the best choice."""
        late_ms = self._costs.item(index, cost.TTFT) - due_ms
        return late_ms if late_ms > 0.0 else 0.0, self._costs.item(index, column)

    def soonest_ms(self) -> float:
        """When the first token comes at the earliest, from now on, in ms, also of those that are full now; infinite: no
        candidate ever takes the prompt."""
        if not len(self):
            return math.inf
        return float(self._costs[self._codes[cost.BARRED] != cost.EXCLUDED, cost.TTFT].min(initial=math.inf))

    def has_idle(self) -> bool:
        """Whether a candidate that takes the prompt has none queued."""
        if not len(self):
            return False
        free, queued = self._codes[cost.BARRED] == cost.FREE, self._candidates.load[:, QUEUED_TOKENS]
        return bool((free & (queued == 0)).any())

    def share_ms(self, work: Work) -> float:
        """How long so much work takes when the candidates share it, in ms."""
        times = self._candidates.times
        alone_ms = np.maximum(times[:, cost.TOKEN] * work.tokens + times[:, cost.PAIR] * work.pairs, 1e-9)
        return 1 / float((1 / alone_ms).sum()) if len(self) else 0.0

    def __len__(self) -> int:
        return len(self._candidates.workers)

    def reason(self, index: int) -> "pb.PlacementReason":
        return cast("pb.PlacementReason", self._codes.item(cost.REASON, index))

    def cached_blocks(self, index: int) -> tuple[int, int]:
        """Blocks of the prompt that the candidate need not compute, and blocks of the prompt that it holds: one more
        when it holds the whole prompt, because the last token is always computed, for its logits."""
        held = self._candidates.cached.item(index)
        return min(held, (self._request.num_tokens - 1) // self._request.block_size), held

    def device_blocks(self, index: int) -> int:
        """Blocks that the candidate need not compute and holds on its device: for others it takes new ones."""
        below = int(self._candidates.lower[:, index].sum()) if self._candidates.lower.size else 0
        return max(0, self.cached_blocks(index)[0] - below)

    def worker(self, index: int) -> WorkerKey:
        return self._candidates.workers[index]

    def costs(self, column: int = cost.TOTAL) -> list[Cost]:
        """`column`: cost.KEPT for what it costs that they keep the answer."""
        return [self._cost(i, column) for i in range(len(self))]

    def _cost(self, i: int, column: int) -> Cost:
        load = self._candidates.load[i]
        reason, barred = self._codes[:, i].tolist()
        *terms, total, ttft_ms, kept = self._costs[i].tolist()
        if column == cost.KEPT and kept < math.inf:
            terms[cost.DECODE], total = terms[cost.DECODE] + kept - total, kept
        elif column == cost.KEPT:
            barred = barred or cost.NO_ROOM
        return Cost(
            worker=self.worker(i),
            role=self._role,
            prompt_blocks=-(-self._request.num_tokens // self._request.block_size),
            cached_blocks=self.cached_blocks(i)[0],
            lower_blocks=tuple(self._candidates.lower[:, i : i + 1].ravel().tolist()),
            queued_tokens=load.item(QUEUED_TOKENS),
            active_blocks=load.item(ACTIVE_BLOCKS),
            runs_prompt=reason >= cost.RUNS_PROMPT,
            reason=reason,
            barred=barred,
            terms=tuple(terms),
            total=total,
            ttft_ms=ttft_ms,
        )
