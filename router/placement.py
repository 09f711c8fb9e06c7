"""Which workers serve a request. Pure: facts and candidates in, a decision with its reasons out; no clock, no I/O.

Called by generation for each attempt, through the admission queue. All costs are in KV blocks:

    prefill_weight * (prompt - overlap_weight * cached + queued prefill) + load_weight * active
    + eviction_weight * stored

Where there is no prefill worker, the same workers prefill and decode, and `mixed_load_weight` takes the place of
`load_weight`: what decodes there delays a prompt far less than the prompts before it. `stored` is what prompts sent to
a worker lately had to store, each block in the place of a cached one: it sends new prompts where the least is lost.

A prefill worker is chosen by that cost. A decode worker is chosen by its load, for which the prompt counts in full when
it is shipped; where the uncached rest of the prompt is short, or no prefill worker is alive, the decode worker would
run the prompt itself and its own cache and queue enter the cost: the bonus for the blocks that need no transfer.
"""

import math
import random
from collections.abc import Sequence

from msgspec import Struct

from baton.config import PlacementConfig
from router.match import WorkerKey


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
    stored_blocks: float = 0.0  # that it had to store lately, each in the place of a cached one


class Cost(Struct, frozen=True, gc=False):
    """The terms of one candidate's cost, in blocks."""

    worker: WorkerKey
    role: str  # "prefill" | "decode"
    prompt_blocks: int
    cached_blocks: int
    queued_blocks: float
    active_blocks: int
    runs_prompt: bool  # False: a decode worker that would receive the prompt's KV; cache and queue do not count
    total: float
    barred: str = ""  # why it could not be chosen
    stored_blocks: float = 0.0


class Placement(Struct, frozen=True):
    decode: WorkerKey
    prefill: WorkerKey | None  # None: the decode worker runs the prompt
    reason: str  # "shipped" | "short prompt" | "no prefill worker"
    cached_blocks: int  # on the worker that runs the prompt
    costs: list[Cost]  # of all candidates, the chosen ones included


def place(
    request: Request,
    decode: Sequence[Candidate],
    prefill: Sequence[Candidate],
    config: PlacementConfig,
    rng: random.Random,
) -> Placement | None:
    """None: wait. There is no decode candidate, or the prompt must be shipped and every prefill worker has its fill."""
    prefill_costs = [_prefill_cost(request, candidate, config) for candidate in prefill]
    chosen_prefill = _choose(prefill_costs, config.temperature, rng)
    alone = all(candidate.worker in request.excluded for candidate in prefill)
    decode_costs = [_decode_cost(request, candidate, alone, chosen_prefill is not None, config) for candidate in decode]
    chosen_decode = _choose(decode_costs, config.temperature, rng)
    if chosen_decode is None:
        return None
    costs = prefill_costs + decode_costs
    if chosen_decode.runs_prompt:
        reason = "no prefill worker" if alone else "short prompt"
        return Placement(chosen_decode.worker, None, reason, chosen_decode.cached_blocks, costs)
    assert chosen_prefill is not None, "a prompt is shipped only when a prefill worker takes it"
    return Placement(chosen_decode.worker, chosen_prefill.worker, "shipped", chosen_prefill.cached_blocks, costs)


def _prefill_cost(request: Request, candidate: Candidate, config: PlacementConfig) -> Cost:
    barred = ""
    if candidate.worker in request.excluded:
        barred = "excluded"
    elif candidate.queued_prefill_tokens >= config.prefill_queue_tokens:
        barred = "queue full"
    return _cost(request, candidate, "prefill", True, barred, config, config.load_weight)


def _decode_cost(request: Request, candidate: Candidate, alone: bool, can_ship: bool, config: PlacementConfig) -> Cost:
    uncached = request.num_tokens - _usable_cached_blocks(request, candidate) * request.block_size
    # Prompts that it runs already count too: together they may hold up its running sequences only so long.
    runs_prompt = alone or uncached + candidate.queued_prefill_tokens <= config.local_prefill_tokens
    barred = ""
    if candidate.worker in request.excluded:
        barred = "excluded"
    elif not runs_prompt and not can_ship:
        barred = "prefill workers full"
    load_weight = config.mixed_load_weight if alone else config.load_weight
    return _cost(request, candidate, "decode", runs_prompt, barred, config, load_weight)


def _cost(
    request: Request,
    candidate: Candidate,
    role: str,
    runs_prompt: bool,
    barred: str,
    config: PlacementConfig,
    load_weight: float,
) -> Cost:
    prompt_blocks = -(-request.num_tokens // request.block_size)
    cached_blocks = _usable_cached_blocks(request, candidate)
    queued_blocks = candidate.queued_prefill_tokens / request.block_size
    prefill_blocks: float = prompt_blocks
    stored_blocks = 0.0
    if runs_prompt:
        prefill_blocks += queued_blocks - config.overlap_weight * cached_blocks
        stored_blocks = candidate.stored_blocks
    total = (
        config.prefill_weight * prefill_blocks
        + load_weight * candidate.active_blocks
        + config.eviction_weight * stored_blocks
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
        stored_blocks,
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
    spread = max(cost.total for cost in eligible) - lowest or 1.0
    weights = [math.exp((lowest - cost.total) / (spread * temperature)) for cost in eligible]
    return rng.choices(eligible, weights)[0]
