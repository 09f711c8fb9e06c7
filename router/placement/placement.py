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

Beside prefill workers, each decode worker's prompt may be shipped to it or run on it, and the cheaper way counts; and a
prefill worker may keep the answer, as a mixed one does. A prompt delays the tokens of the requests where it runs
(`delay_weight`). A prompt that is shipped costs what the cheapest prefill worker costs, the way of the tokens that the
decode worker lacks, its decode steps and what it evicts. A prefill worker without answers keeps its first one for
`keep_steps` of its decode steps. While no prefill worker takes more, a decode worker without a queued prompt runs one.
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
    decode: WorkerKey  # of either role
    prefill: WorkerKey | None  # None: the worker that decodes runs the prompt
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
    keeps: bool = False  # a prefill worker would keep the answer

    @property
    def best(self) -> tuple[Weighed, int]:
        """The candidates that the worker which decodes is one of, and its index; -1: the request waits."""
        return (self.prefill, self.prefill.keeper) if self.keeps else (self.decode, self.decode.chosen)

    @property
    def runners(self) -> Weighed:
        """The candidates that run prompts; beside prefill workers decode workers do so only at times."""
        return self.prefill if len(self.prefill) else self.decode

    def placement(self) -> Placement | None:
        """The workers; None: the request waits, because nobody has room for the answer or nobody can ship the prompt to
        who has."""
        decode, chosen = self.best
        if chosen < 0:
            return None
        runs, index, shipper = decode, chosen, None
        reason = cost.KEEPS if self.keeps else decode.reason(chosen)
        if reason < cost.RUNS_PROMPT:
            runs, index = self.prefill, self.prefill.chosen
            assert index >= 0, "a prompt is shipped only when a prefill worker takes it"
            shipper = runs.worker(index)
        return Placement(
            decode.worker(chosen), shipper, reason, *runs.cached_blocks(index), decode.ttft_ms(chosen), self
        )

    def costs(self) -> list[Cost]:
        prefill, decode = self.costs_by_role()
        return prefill + decode

    def costs_by_role(self) -> tuple[list[Cost], list[Cost]]:
        """Those of the prefill and of the decode workers."""
        return self.prefill.costs(cost.KEPT if self.keeps else cost.TOTAL), self.decode.costs()

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
    *,
    may_keep: bool = True,
) -> Weighing:
    """`max_running`: a worker with as many requests has no room for an answer. `due_ms`: when the first token is due,
    from now on. Among the workers that are in time the cheapest is chosen, and the soonest where none is. `may_keep`:
    prefill workers may keep the answer."""
    shipped_ms = due_ms - config.ship_ms - config.ship_token_ms * request.num_tokens  # at most so long is the way
    rooms = (max_running if may_keep else 0, max_running)
    weighing = _weighing(request, decode, prefill, config, rng, rooms, due_ms, shipped_ms)
    weighed, chosen = weighing.best
    if weighing.prefill.chosen >= 0 and chosen >= 0 and weighed.ttft_ms(chosen) > due_ms:
        # The decode worker's part of the way was longer: the soonest prefill worker may be in time.
        weighing = _weighing(request, decode, prefill, config, rng, rooms, due_ms, -math.inf)
    return weighing


def _weighing(
    request: Request,
    decode: Candidates,
    prefill: Candidates,
    config: Weights,
    rng: random.Random,
    rooms: tuple[int, int],
    due_ms: float,
    shipped_ms: float,
) -> Weighing:
    """`rooms`: for answers, on a prefill and on a decode worker. `shipped_ms`: when the prompt is due at the end of its
    computing."""
    alone = nobody_ships(request, prefill.workers)
    prefills = Weighed(
        "prefill",
        request,
        prefill,
        config,
        rng,
        due_ms=shipped_ms,
        max_requests=rooms[0],
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
        max_requests=rooms[1],
    )
    return Weighing(prefills, decodes, _keeps(prefills, decodes))


def _keeps(prefill: Weighed, decode: Weighed) -> bool:
    """Whether a prefill worker keeps the answer because it costs less there, or comes sooner where all are late."""
    keeper, chosen, due_ms = prefill.keeper, decode.chosen, decode.due_ms
    if keeper < 0 or chosen < 0:
        return keeper >= 0
    return prefill.rank(keeper, due_ms, cost.KEPT) < decode.rank(chosen, due_ms)


def nobody_ships(request: Request, prefill_workers: Sequence[WorkerKey]) -> bool:
    """Whoever decodes the request runs its prompt: there is no prefill worker, or each has failed or refused it."""
    return all(worker in request.excluded for worker in prefill_workers)
