"""Which workers serve a request. Pure: facts and candidates in, a decision with its reasons out; no clock, no I/O.

All costs are in milliseconds. The cost of a worker that runs the prompt is the time until its first token, and what
that costs others:

    max(queued prompts, until its blocks are free) + own computing + decode_steps * decode step
    + crowd_weight * uncached share of the prompt * (min(mean queue, own queue + whole prompt / 4)
                                                     + 3 * (1 - 1 / workers) * min(shortest queue, whole prompt))
    + 0.5 * uncached part of the prompt * min(8, blocks in use / unused blocks)

Times follow from the worker's own step times, attention included. The prompt in computation counts with what is left of
it. Blocks come free as fast as lately, and a prompt must leave one for each running request, which may need it soon. In
the mean, a faster worker's queue counts for more. What later prompts wait and what is evicted make a cached prefix
worth the more, the fuller the workers; where all idle, the first token wins.

Beside prefill workers, each decode worker's prompt may be shipped to it or run on it, and the cheaper way counts. A
prompt that runs on it also delays the tokens of the requests there (`delay_weight`). A prompt that is shipped costs
what the cheapest prefill worker costs, the way of the tokens that the decode worker lacks, its decode steps and what it
evicts. While no prefill worker takes more, a decode worker without a queued prompt runs one.
"""

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from baton_proto.generated import inference_pb2 as pb
from router.placement import cost
from router.placement.candidates import NO_LIMIT, Candidates, Cost, Request, Weighed
from router.placement.weights import Weights
from runtime.discovery.worker_key import WorkerKey


class Placement(NamedTuple):
    decode: WorkerKey
    prefill: WorkerKey | None  # None: the decode worker runs the prompt
    reason: "pb.PlacementReason"
    cached_blocks: int  # that the worker that runs the prompt need not compute
    held_blocks: int  # of the prompt, on that worker: one more when it holds all of it
    ttft_ms: float  # expected, from now on
    weighing: "Weighing"

    @property
    def costs(self) -> list[Cost]:
        """The costs of all candidates, the chosen ones included."""
        return self.weighing.costs()


class Weighing(NamedTuple):
    """All candidates with what they cost, and who came out first, even when the request has to wait."""

    prefill: Weighed
    decode: Weighed

    def placement(self) -> Placement | None:
        """The workers; None: the request waits, because no decode worker has room or nobody can ship the prompt to
        it."""
        prefill, decode, chosen = self.prefill, self.decode, self.decode.chosen
        if chosen < 0:
            return None
        reason = decode.reason(chosen)
        if reason >= cost.RUNS_PROMPT:
            runs, index, shipper = decode, chosen, None
        else:
            runs, index = prefill, prefill.chosen
            assert index >= 0, "a prompt is shipped only when a prefill worker takes it"
            shipper = prefill.worker(index)
        return Placement(
            decode.worker(chosen), shipper, reason, *runs.cached_blocks(index), decode.ttft_ms(chosen), self
        )

    def costs(self) -> list[Cost]:
        return self.prefill.costs() + self.decode.costs()

    @property
    def num_candidates(self) -> int:
        return len(self.prefill) + len(self.decode)


def weigh(
    request: Request,
    decode: Candidates,
    prefill: Candidates,
    config: Weights,
    rng: random.Random,
    max_running: int = NO_LIMIT,
    due_ms: float = math.inf,
) -> Weighing:
    """`max_running`: a decode worker with as many requests has no room. `due_ms`: when the first token is due, from now
    on. Among the workers that are in time the cheapest is chosen, and the soonest where none is."""
    shipped_ms = due_ms - config.ship_ms - config.ship_token_ms * request.num_tokens  # at most so long is the way
    weighing = _weighing(request, decode, prefill, config, rng, max_running, due_ms, shipped_ms)
    chosen = weighing.decode.chosen
    if weighing.prefill.chosen >= 0 and chosen >= 0 and weighing.decode.ttft_ms(chosen) > due_ms:
        # The decode worker's part of the way was longer: the soonest prefill worker may be in time.
        weighing = _weighing(request, decode, prefill, config, rng, max_running, due_ms, -math.inf)
    return weighing


def _weighing(
    request: Request,
    decode: Candidates,
    prefill: Candidates,
    config: Weights,
    rng: random.Random,
    max_running: int,
    due_ms: float,
    shipped_ms: float,
) -> Weighing:
    """`shipped_ms`: when the prompt is due at the end of its computing."""
    alone = nobody_ships(request, prefill.workers)
    prefills = Weighed(
        "prefill",
        request,
        prefill,
        config,
        rng,
        alone=True,
        due_ms=shipped_ms,
        max_queued_tokens=config.prefill_queue_tokens,
    )
    decodes = Weighed(
        "decode",
        request,
        decode,
        config,
        rng,
        alone=alone,
        due_ms=due_ms,
        shipper=prefills.shipper,
        max_requests=max_running,
    )
    return Weighing(prefills, decodes)


def nobody_ships(request: Request, prefill_workers: Sequence[WorkerKey]) -> bool:
    """Whoever decodes the request runs its prompt: there is no prefill worker, or each has failed or refused it."""
    return all(worker in request.excluded for worker in prefill_workers)
