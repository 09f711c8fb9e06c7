"""Which workers serve a request. Pure: facts and candidates in, a decision with its reasons out; no clock, no I/O.

Called by generation for each attempt, through the admission queue. All costs are in KV blocks:

    prefill_weight * (prompt - overlap_weight * cached + queued prefill)
    + transfer_weight * shipped + load_weight * active

A prefill worker is chosen by that cost. A decode worker is chosen by its load, for which the prompt counts in full when
it is shipped, and by the blocks that it holds already and nobody has to ship. Where the uncached rest of the prompt is
short and the decode worker not busy, or no prefill worker is alive, the decode worker would run the prompt itself and
its own cache and queue enter the cost: the bonus for a prompt that needs no transfer.
"""

import math
import random
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from baton.config import PlacementConfig
from router.match import WorkerKey

LONG: Final = "shipped"
BUSY: Final = "shipped, decode worker busy"  # it is short, but the decode worker has its fill of prompts or of requests
SHORT: Final = "short prompt"
ALONE: Final = "no prefill worker"


class Request(Struct, frozen=True, gc=False):
    """What placement must know of a request."""

    num_tokens: int  # prompt and replayed output
    block_size: int
    excluded: frozenset[WorkerKey] = frozenset()  # they failed or refused it


class Candidate(Struct, frozen=True, gc=False):
    """A worker that is ready. For a decode worker the caller has made sure that there is room."""

    worker: WorkerKey
    cached_blocks: int  # of the prompt's prefix, as the radix tree has it
    queued_prefill_tokens: int
    active_blocks: int  # of running sequences; 0 for a prefill worker, whose queue says it all
    requests: int = 0  # in flight on a decode worker


class Cost(Struct, frozen=True, gc=False):
    """The terms of one candidate's cost, in blocks."""

    worker: WorkerKey
    role: str  # "prefill" | "decode"
    prompt_blocks: int
    cached_blocks: int
    queued_blocks: float
    active_blocks: int
    runs_prompt: bool  # False: a decode worker that would receive the prompt's KV; its queue does not count
    total: float
    barred: str = ""  # why it could not be chosen
    reason: str = ""  # of a decode worker: why it would run the prompt or have it shipped, see Placement


class Placement(Struct, frozen=True):
    decode: WorkerKey
    prefill: WorkerKey | None  # None: the decode worker runs the prompt
    reason: str  # LONG | BUSY, when the prompt is shipped | SHORT | ALONE, when it is not
    cached_blocks: int  # on the worker that runs the prompt
    costs: list[Cost]  # of all candidates, the chosen ones included


class Weighing(Struct, frozen=True):
    """All candidates with their costs, and who came out first, even when the request has to wait."""

    prefill: list[Cost]
    decode: list[Cost]
    chosen_prefill: Cost | None
    chosen_decode: Cost | None
    alone: bool  # no prefill worker is there to ship a prompt to

    def placement(self) -> Placement | None:
        """None: wait. There is no decode candidate, or the prompt must be shipped and every prefill worker has its
        fill."""
        decode, prefill = self.chosen_decode, self.chosen_prefill
        if decode is None:
            return None
        costs = self.prefill + self.decode
        if decode.runs_prompt:
            return Placement(decode.worker, None, decode.reason, decode.cached_blocks, costs)
        assert prefill is not None, "a prompt is shipped only when a prefill worker takes it"
        return Placement(decode.worker, prefill.worker, decode.reason, prefill.cached_blocks, costs)


def place(
    request: Request,
    decode: Sequence[Candidate],
    prefill: Sequence[Candidate],
    config: PlacementConfig,
    rng: random.Random,
) -> Placement | None:
    """None: wait."""
    return weigh(request, decode, prefill, config, rng).placement()


def weigh(
    request: Request,
    decode: Sequence[Candidate],
    prefill: Sequence[Candidate],
    config: PlacementConfig,
    rng: random.Random,
) -> Weighing:
    prefill_costs = [_prefill_cost(request, candidate, config) for candidate in prefill]
    chosen_prefill = _choose(prefill_costs, config.temperature, rng)
    alone = all(candidate.worker in request.excluded for candidate in prefill)
    decode_costs = [_decode_cost(request, candidate, alone, chosen_prefill is not None, config) for candidate in decode]
    chosen_decode = _choose(decode_costs, config.temperature, rng)
    return Weighing(prefill_costs, decode_costs, chosen_prefill, chosen_decode, alone)


def chances(costs: Sequence[Cost], temperature: float) -> list[float]:
    """How likely each of the candidates of one role was to be chosen, before the dice fell."""
    eligible = [cost for cost in costs if not cost.barred]
    if not eligible:
        return [0.0] * len(costs)
    lowest = min(cost.total for cost in eligible)
    if temperature == 0:
        weights = [float(not cost.barred and cost.total == lowest) for cost in costs]
    else:
        soft = iter(_softmax_weights(eligible, lowest, temperature))
        weights = [0.0 if cost.barred else next(soft) for cost in costs]
    return [weight / sum(weights) for weight in weights]


def _prefill_cost(request: Request, candidate: Candidate, config: PlacementConfig) -> Cost:
    barred = ""
    if candidate.worker in request.excluded:
        barred = "excluded"
    elif candidate.queued_prefill_tokens >= config.prefill_queue_tokens:
        barred = "queue full"
    return _cost(request, candidate, "prefill", True, barred, "", config)


def _decode_cost(request: Request, candidate: Candidate, alone: bool, can_ship: bool, config: PlacementConfig) -> Cost:
    reason = ALONE if alone else _disaggregation(request, candidate, config)
    runs_prompt = reason in (ALONE, SHORT)
    barred = ""
    if candidate.worker in request.excluded:
        barred = "excluded"
    elif not runs_prompt and not can_ship:
        barred = "prefill workers full"
    return _cost(request, candidate, "decode", runs_prompt, barred, reason, config)


def _disaggregation(request: Request, candidate: Candidate, config: PlacementConfig) -> str:
    """Whether a decode worker would run the prompt or have it shipped, by the reason."""
    uncached = request.num_tokens - _usable_cached_blocks(request, candidate) * request.block_size
    if uncached > config.local_prefill_tokens:
        return LONG
    # Prompts that it runs already count too: together they may hold up its running sequences only so long.
    too_many_tokens = uncached + candidate.queued_prefill_tokens > config.local_prefill_tokens
    return BUSY if too_many_tokens or candidate.requests >= config.local_prefill_requests else SHORT


def _cost(
    request: Request,
    candidate: Candidate,
    role: str,
    runs_prompt: bool,
    barred: str,
    reason: str,
    config: PlacementConfig,
) -> Cost:
    prompt_blocks = -(-request.num_tokens // request.block_size)
    cached_blocks = _usable_cached_blocks(request, candidate)
    queued_blocks = candidate.queued_prefill_tokens / request.block_size
    prefill_blocks: float = prompt_blocks
    if runs_prompt:
        prefill_blocks += queued_blocks - config.overlap_weight * cached_blocks
    shipped_blocks = 0 if runs_prompt else prompt_blocks - cached_blocks
    total = (
        config.prefill_weight * prefill_blocks
        + config.transfer_weight * shipped_blocks
        + config.load_weight * candidate.active_blocks
    )
    return Cost(
        candidate.worker,
        role,
        prompt_blocks,
        cached_blocks,
        queued_blocks,
        candidate.active_blocks,
        runs_prompt,
        total,
        barred,
        reason,
    )


def _usable_cached_blocks(request: Request, candidate: Candidate) -> int:
    """The last token is always computed, for its logits."""
    return min(candidate.cached_blocks, (request.num_tokens - 1) // request.block_size)


def _choose(costs: Sequence[Cost], temperature: float, rng: random.Random) -> Cost | None:
    """The cheapest, ties at random; above temperature 0 by softmax over -(cost - lowest) / (highest - lowest)."""
    eligible = [cost for cost in costs if not cost.barred]
    if len(eligible) < 2:
        return eligible[0] if eligible else None
    lowest = min(cost.total for cost in eligible)
    if temperature == 0:
        return rng.choice([cost for cost in eligible if cost.total == lowest])
    return rng.choices(eligible, _softmax_weights(eligible, lowest, temperature))[0]


def _softmax_weights(eligible: Sequence[Cost], lowest: float, temperature: float) -> list[float]:
    spread = max(cost.total for cost in eligible) - lowest or 1.0
    return [math.exp((lowest - cost.total) / (spread * temperature)) for cost in eligible]
