"""Which workers serve a request. Pure: facts and candidates in, a decision with its reasons out; no clock, no I/O.

All costs are in KV blocks. The cost of a worker that runs the prompt is

    prefill_weight * (prompt - overlap_weight * cached + queued prefill) + load_weight * active

Prompt, cached and queued count the attention of their tokens to all tokens before: a block behind `attention_tokens`
tokens counts as two. Because of that a long prefix is worth more than as many blocks of short ones, and a long prompt
in the queue costs more than short ones.

A prefill worker is chosen by that cost without the load. A decode worker that would receive the prompt's KV costs

    prefill_weight * prompt + transfer_weight * (prompt - cached) + load_weight * active

A decode worker runs the prompt itself, and its cache and queue count, in three cases. The uncached rest of the prompt
is short and the worker not busy. Or all prefill workers are full and this worker has no queued prompt: it takes one at
a time, which delays what it decodes and spares the other prompts the wait. Or no prefill worker is alive.

Without prefill workers the same workers prefill and decode, and three weights differ. `mixed_load_weight`: decoding
delays a prompt far less than queued prompts do. `mixed_overlap_weight`: a cached block is worth more than computing it
again, because storing it anew pushes another block out; a prefix that is asked for so often that every worker will be
asked for it is worth less, because every worker should hold it. `eviction_weight`: blocks that a worker had to store
lately replaced cached ones, so new prompts go where the fewest were stored.
"""

import random
from collections.abc import Sequence
from typing import Final, NamedTuple

from baton_proto.generated import inference_pb2 as pb
from router.placement import cost
from router.placement.candidates import NO_LIMIT, Candidates, Cost, Request, Weighed
from runtime.discovery.worker_key import WorkerKey

WIDELY_ASKED: Final = 2.0  # overlap weight of a prefix for which every worker was asked once, lately


class Placement(NamedTuple):
    decode: WorkerKey
    prefill: WorkerKey | None  # None: the decode worker runs the prompt
    reason: "pb.PlacementReason"
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

    prefill: Weighed
    decode: Weighed

    def placement(self) -> Placement | None:
        """None: the request waits. No decode worker has room, or nobody can ship the prompt to it."""
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
        return Placement(decode.worker(chosen), shipper, reason, *runs.cached_blocks(index), self)

    def costs(self) -> list[Cost]:
        return self.prefill.costs() + self.decode.costs()


def weigh(
    request: Request,
    decode: Candidates,
    prefill: Candidates,
    rules: cost.Rules,
    rng: random.Random,
    max_running: int = NO_LIMIT,
    prefix_hits: float = 0.0,
) -> Weighing:
    """`max_running`: a decode worker with as many requests has no room. `prefix_hits`: recent requests for the longest
    prefix of the prompt that any worker holds, see PrefixHits.recent."""
    alone = nobody_ships(request, prefill.workers)
    prefills = Weighed(
        *("prefill", request, prefill, rules, rules.prefill, rng),
        alone=True,
        can_ship=False,
        max_queued_tokens=rules.config.prefill_queue_tokens,
    )
    weights = rules.mixed if alone else rules.decode
    if alone and prefix_hits:
        overlap = min(weights[cost.CACHED], WIDELY_ASKED * len(decode.workers) / prefix_hits)
        weights = (*weights[: cost.CACHED], overlap, *weights[cost.CACHED + 1 :])
    decodes = Weighed(
        *("decode", request, decode, rules, weights, rng),
        alone=alone,
        can_ship=prefills.chosen >= 0,
        max_requests=max_running,
    )
    return Weighing(prefills, decodes)


def nobody_ships(request: Request, prefill_workers: Sequence[WorkerKey]) -> bool:
    """Whoever decodes the request runs its prompt: there is no prefill worker, or each has failed or refused it."""
    return all(worker in request.excluded for worker in prefill_workers)
