"""Which workers serve a request. Pure: facts and candidates in, a decision with its reasons out; no clock, no I/O.

Called by generation for each attempt, through the admission queue. All costs are in KV blocks:

    prefill_weight * (prompt - overlap_weight * cached + queued prefill)
    + transfer_weight * shipped + load_weight * active + eviction_weight * stored

What is computed (prompt, cached, queued) counts the attention of its tokens to all before them: a block behind
`attention_tokens` tokens counts as two. So a long prefix is worth more than as many blocks of short ones, and a long
prompt in the queue costs more than short ones.

Where there is no prefill worker, the same workers prefill and decode, and other weights hold. What decodes there delays
a prompt far less than the prompts before it: `mixed_load_weight`. A cached block is worth more than computing it again,
since storing it anew pushes another one out: `mixed_overlap_weight`; except for a prefix that is asked for so often
that each worker would be asked for it, which is worth having everywhere. `stored` is what prompts sent to a worker
lately had to store, each block in the place of a cached one: it sends new prompts where the least is lost. Elsewhere
it is 0.

A prefill worker is chosen by that cost. A decode worker is chosen by its load, for which the prompt counts in full when
it is shipped, and by the blocks that it holds already and nobody has to ship. Where the uncached rest of the prompt is
short and the decode worker not busy, or no prefill worker is alive, the decode worker would run the prompt itself and
its own cache and queue enter the cost: the bonus for a prompt that needs no transfer. So it is when the prefill workers
have their fill of prompts and the decode worker has none in its queue: one prompt at a time runs there then, which
delays what decodes for as long, and spares the others the wait.
"""

import math
import random
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from router.placement import cost_loop
from runtime.config.serving import PlacementConfig
from runtime.discovery.worker_key import WorkerKey

LONG: Final = "shipped"
BUSY: Final = "shipped, decode worker busy"  # it is short, but the decode worker has its fill of prompts or of requests
SHORT: Final = "short prompt"
FULL: Final = "prefill workers full"  # and this decode worker has no prompt in its queue
ALONE: Final = "no prefill worker"
REASONS: Final = (LONG, BUSY, SHORT, FULL, ALONE)

NO_ROOM: Final = "has its limit of requests"

NO_LIMIT: Final = 2**62

WIDELY_ASKED: Final = 2.0  # what a cached block of a prefix is worth that every worker was asked for once, lately

_REASONS: Final = {
    cost_loop.LONG: LONG,
    cost_loop.BUSY: BUSY,
    cost_loop.SHORT: SHORT,
    cost_loop.FULL: FULL,
    cost_loop.ALONE: ALONE,
}
_BARRED: Final = {
    cost_loop.FREE: "",
    cost_loop.EXCLUDED: "excluded",
    cost_loop.QUEUE_FULL: "queue full",
    cost_loop.NO_ROOM: NO_ROOM,
    cost_loop.NOBODY_SHIPS: FULL,
}


class Request(Struct, frozen=True, gc=False):
    """What placement must know of a request."""

    num_tokens: int  # prompt and replayed output
    block_size: int
    excluded: frozenset[WorkerKey] = frozenset()  # they failed or refused it


class Candidates(NamedTuple):
    """Workers of one role that are ready, as columns."""

    workers: Sequence[WorkerKey]
    cached: NDArray[np.int32]  # [n] blocks of the prompt's prefix, as the radix tree has it
    load: NDArray[np.int64]  # [n, 4] as LoadLedger.columns gives it
    stored: NDArray[np.float64]  # [n] blocks that each had to store lately, as LoadLedger.stored gives it, or zeros


NO_CANDIDATES: Final = Candidates((), np.empty(0, dtype=np.int32), np.empty((0, 4), dtype=np.int64), np.empty(0))


class Weights(NamedTuple):
    """Of the terms of a cost, for candidates of one role."""

    overlap: float
    prefill: float
    transfer: float
    load: float
    eviction: float


NO_WEIGHTS: Final = Weights(0.0, 0.0, 0.0, 0.0, 0.0)


class Cost(Struct, frozen=True, gc=False):
    """The terms of one candidate's cost, in blocks."""

    worker: WorkerKey
    role: str  # "prefill" | "decode"
    prompt_blocks: int
    cached_blocks: int
    queued_tokens: int  # of prompts
    active_blocks: int
    prompt_work: float  # what computing the prompt, the cached blocks and the queued tokens takes, attention included
    cached_work: float
    queued_work: float
    runs_prompt: bool  # False: a decode worker that would receive the prompt's KV; its queue does not count
    total: float
    barred: str = ""  # why it could not be chosen
    reason: str = ""  # of a decode worker: why it would run the prompt or have it shipped, see Placement
    stored_blocks: float = 0.0  # lately
    weights: Weights = NO_WEIGHTS


class Placement(NamedTuple):
    decode: WorkerKey
    prefill: WorkerKey | None  # None: the decode worker runs the prompt
    reason: str  # LONG | BUSY, when the prompt is shipped | SHORT | FULL | ALONE, when it is not
    cached_blocks: int  # that the worker that runs the prompt need not compute
    held_blocks: int  # of the prompt, on that worker: one more when it holds all of it
    weighing: "Weighing"

    @property
    def costs(self) -> list[Cost]:
        """Of all candidates, the chosen ones included."""
        return self.weighing.costs()

    @property
    def num_candidates(self) -> int:
        return len(self.weighing.prefill) + len(self.weighing.decode)


class Weighing(NamedTuple):
    """All candidates with what they cost, and who came out first, even when the request has to wait."""

    prefill: "_Weighed"
    decode: "_Weighed"
    chosen_prefill: int  # index; -1: all are barred, or there is none
    chosen_decode: int

    def placement(self) -> Placement | None:
        """None: wait. No decode worker has room, or nobody can ship the prompt to it."""
        prefill, decode, chosen, shipper = self.prefill, self.decode, self.chosen_decode, self.chosen_prefill
        if chosen < 0:
            return None
        reason = int(decode.reasons[chosen])
        if reason >= cost_loop.RUNS_PROMPT:
            cached, held = decode.cached_blocks(chosen), decode.held_blocks(chosen)
            return Placement(decode.worker(chosen), None, _REASONS[reason], cached, held, self)
        assert shipper >= 0, "a prompt is shipped only when a prefill worker takes it"
        cached, held = prefill.cached_blocks(shipper), prefill.held_blocks(shipper)
        return Placement(decode.worker(chosen), prefill.worker(shipper), _REASONS[reason], cached, held, self)

    def costs(self) -> list[Cost]:
        return self.prefill.costs() + self.decode.costs()


def place(
    request: Request,
    decode: Candidates,
    prefill: Candidates,
    config: PlacementConfig,
    rng: random.Random,
    max_running: int = NO_LIMIT,
    prefix_hits: float = 0.0,
) -> Placement | None:
    """None: wait."""
    return weigh(request, decode, prefill, config, rng, max_running, prefix_hits).placement()


def weigh(
    request: Request,
    decode: Candidates,
    prefill: Candidates,
    config: PlacementConfig,
    rng: random.Random,
    max_running: int = NO_LIMIT,
    prefix_hits: float = 0.0,
) -> Weighing:
    """`max_running`: a decode worker with as many requests has no room. `prefix_hits`: of the longest prefix that
    anybody holds, lately, see PrefixHits.recent."""
    prefills, decodes = _Weighed("prefill", request, prefill), _Weighed("decode", request, decode)
    shipper = prefills.choose(
        _prefill_weights(config), config, rng, alone=True, can_ship=False, max_queued_tokens=config.prefill_queue_tokens
    )
    alone = nobody_ships(request, prefill.workers)
    weights = _mixed_weights(config, len(decode.workers), prefix_hits) if alone else _decode_weights(config)
    chosen = decodes.choose(weights, config, rng, alone=alone, can_ship=shipper >= 0, max_requests=max_running)
    return Weighing(prefills, decodes, shipper, chosen)


def _pair_cost(config: PlacementConfig, block_size: int) -> float:
    """Of a pair of tokens in attention, in blocks."""
    return 1 / (config.attention_tokens * block_size) if config.attention_tokens else 0.0


def nobody_ships(request: Request, prefill_workers: Sequence[WorkerKey]) -> bool:
    """Whoever decodes the request runs its prompt: there is no prefill worker, or each has failed or refused it."""
    return all(worker in request.excluded for worker in prefill_workers) if request.excluded else not prefill_workers


def _prefill_weights(config: PlacementConfig) -> Weights:
    """Its queue says it all, so the load of a prefill worker costs nothing."""
    return Weights(config.overlap_weight, config.prefill_weight, config.transfer_weight, 0.0, 0.0)


def _decode_weights(config: PlacementConfig) -> Weights:
    return Weights(config.overlap_weight, config.prefill_weight, config.transfer_weight, config.load_weight, 0.0)


def _mixed_weights(config: PlacementConfig, num_workers: int, prefix_hits: float) -> Weights:
    """Of workers that prefill and decode. The more a prefix is asked for, the less it binds: one that each of them
    would be asked for is worth having everywhere."""
    overlap = config.mixed_overlap_weight
    if prefix_hits:
        overlap = min(overlap, WIDELY_ASKED * num_workers / prefix_hits)
    return Weights(
        overlap, config.prefill_weight, config.transfer_weight, config.mixed_load_weight, config.eviction_weight
    )


def chances(costs: Sequence[Cost], temperature: float) -> list[float]:
    """How likely each of the candidates of one role was to be chosen, before the dice fell."""
    free = [cost.total for cost in costs if not cost.barred]
    if not free:
        return [0.0] * len(costs)
    lowest, spread = min(free), max(free) - min(free)
    weights = [0.0 if cost.barred else _weight(cost.total - lowest, spread * temperature) for cost in costs]
    return [weight / sum(weights) for weight in weights]


def _weight(dearer: float, scale: float) -> float:
    if dearer == 0:
        return 1.0
    return math.exp(-dearer / scale) if scale > 0 else 0.0


class _Weighed:
    """The candidates of one role with what each of them costs."""

    __slots__ = ("_barred", "_candidates", "_pair_cost", "_request", "_role", "_totals", "_weights", "reasons")

    def __init__(self, role: str, request: Request, candidates: Candidates) -> None:
        self._role = role
        self._request = request
        self._candidates = candidates

    def choose(
        self,
        weights: Weights,
        config: PlacementConfig,
        rng: random.Random,
        *,
        alone: bool,
        can_ship: bool,
        max_requests: int = NO_LIMIT,
        max_queued_tokens: int = NO_LIMIT,
    ) -> int:
        """Index of the chosen one, -1 when all are barred. `alone`: whoever is chosen runs the prompt."""
        request, (workers, cached, load, stored) = self._request, self._candidates
        self._weights = weights
        self._pair_cost = _pair_cost(config, request.block_size)
        if not workers:
            return -1
        self.reasons = np.empty(len(workers), dtype=np.int8)  # codes of router/placement/cost_loop.py
        self._barred = np.empty(len(workers), dtype=np.int8)
        self._totals = np.empty(len(workers))
        excluded = np.zeros(len(workers), dtype=np.bool_)
        if request.excluded:
            excluded[:] = [worker in request.excluded for worker in workers]
        return cost_loop.choose(
            *(cached, load, stored, excluded, request.num_tokens, request.block_size, alone, can_ship),
            *(max_requests, max_queued_tokens, config.local_prefill_tokens, config.local_prefill_requests),
            config.local_prefill_when_full and config.local_prefill_tokens > 0,
            *weights,
            *(self._pair_cost, config.temperature, rng.random()),
            self.reasons,
            self._barred,
            self._totals,
        )

    def __len__(self) -> int:
        return len(self._candidates.workers)

    def cached_blocks(self, index: int) -> int:
        """The last token is always computed, for its logits."""
        return min(int(self._candidates.cached[index]), (self._request.num_tokens - 1) // self._request.block_size)

    def held_blocks(self, index: int) -> int:
        return int(self._candidates.cached[index])

    def worker(self, index: int) -> WorkerKey:
        return self._candidates.workers[index]

    def costs(self) -> list[Cost]:
        return [self._cost(i) for i in range(len(self))]

    def _cost(self, i: int) -> Cost:
        num_tokens, block_size = self._request.num_tokens, self._request.block_size
        _, queued, active, queued_pairs = self._candidates.load[i].tolist()
        prompt_blocks, cached_blocks = -(-num_tokens // block_size), self.cached_blocks(i)
        decodes = self._role == "decode"
        return Cost(
            worker=self.worker(i),
            role=self._role,
            prompt_blocks=prompt_blocks,
            cached_blocks=cached_blocks,
            queued_tokens=queued,
            active_blocks=active if decodes else 0,
            prompt_work=prompt_blocks + self._pair_cost * num_tokens**2 / 2,
            cached_work=cached_blocks + self._pair_cost * (cached_blocks * block_size) ** 2 / 2,
            queued_work=queued / block_size + self._pair_cost * queued_pairs,
            runs_prompt=int(self.reasons[i]) >= cost_loop.RUNS_PROMPT,
            total=float(self._totals[i]),
            barred=_BARRED[int(self._barred[i])],
            reason=_REASONS[int(self.reasons[i])] if decodes else "",
            stored_blocks=float(self._candidates.stored[i]),
            weights=self._weights,
        )
