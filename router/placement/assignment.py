"""The router's whole decision for one attempt: match the prefix, list the candidates, place, charge. Invariant: no
await in between, so that each request sees what the one before was charged."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baton_proto.worker import PrefillTarget
from router.index.match import Match, column
from router.index.prefix_hits import PrefixHits
from router.placement.candidates import NO_CANDIDATES, NO_RATES, NO_WORK, Candidates, Request
from router.placement.early_refusal import check_in_time
from router.placement.expected_prefixes import Expectation, ExpectedPrefixes
from router.placement.one_generation import best_generation, of_each_generation
from router.placement.placement import Placement, Weighing, weigh
from router.placement.weights import TARGETS, Weights
from router.workers.link import WorkerLink
from router.workers.load import Charge, LoadLedger
from router.workers.pool import Generation, WorkerPool
from runtime.config.planner import TargetsConfig
from runtime.config.serving import RouterConfig
from runtime.discovery.worker_key import WorkerKey


class PrefixIndex(Protocol):
    """What the decision needs of the indexer."""

    def match(self, hashes: NDArray[np.uint64]) -> Match:
        """How many leading blocks of a prompt each worker holds."""


@dataclass(slots=True, eq=False)
class Assignment:
    """The workers of one attempt, charged until `release`."""

    link: WorkerLink
    prefill: PrefillTarget | None
    placement: Placement
    charge: Charge
    expectation: Expectation | None  # of the worker that runs the prompt; None: it holds all of it
    _prefilling: bool = True

    def prefill_done(self) -> None:
        """The first token has come. Further calls have no effect."""
        if self._prefilling:
            self._prefilling = False
            self.charge.prefill_done()
            if self.expectation is not None:
                self.expectation.first_token()

    def release(self) -> None:
        self.charge.release()
        if self.expectation is not None:
            self.expectation.cancel()


class Assigner:
    def __init__(
        self,
        pool: WorkerPool,
        index: PrefixIndex,
        ledger: LoadLedger,
        config: RouterConfig,
        rng: random.Random | None = None,
        expected: ExpectedPrefixes | None = None,
        hits: PrefixHits | None = None,
        targets: TargetsConfig = TARGETS,
        crowded: Callable[[str], None] = lambda adapter: None,
    ) -> None:
        """`crowded` hears of an adapter whose workers cannot take a request for it now."""
        self._pool = pool
        self._index = index
        self._ledger = ledger
        self._config = config
        self._crowded = crowded
        self.weights = Weights.of(config.placement, targets)
        self._rng = rng or random.Random()
        self._expected = ExpectedPrefixes() if expected is None else expected
        self._hits = PrefixHits() if hits is None else hits

    def assign(
        self,
        request_id: str,
        request: Request,
        max_tokens: int,
        hashes: NDArray[np.uint64],
        due_ms: float = math.inf,
        *,
        is_dated: bool = False,
    ) -> Assignment | None:
        """Chooses workers and charges them; None: no workers can take it now. `max_tokens`: prompt and the longest
        possible output. `is_dated`: its first token is due, and not the whole answer alone. Raises TooLate when no
        first token can come within `due_ms`."""
        generations = self._pool.generations()
        weighing, reused = self._weigh(request, generations, max_tokens, hashes, due_ms, is_dated=is_dated)
        check_in_time(weighing, NO_WORK, due_ms)
        placement = weighing.placement()
        if request.adapter and (placement is None or not self._pool.has_place(placement.decode, request.adapter)):
            self._crowded(request.adapter)
        if placement is None:
            return None
        self._hits.count(reused)
        uncached = request.num_tokens - placement.cached_blocks * request.block_size
        runs = (placement.decode, placement.prefill, request.num_tokens, uncached)
        decode, chosen = weighing.best
        charge = self._ledger.charge(request_id, *runs, held_blocks=decode.device_blocks(chosen))
        target = self._pool.prefill_target(placement.prefill) if placement.prefill else None
        expectation = self._expected.expect(placement.prefill or placement.decode, hashes, placement.held_blocks)
        return Assignment(self._pool.link(placement.decode), target, placement, charge, expectation)

    def computed(self, worker: WorkerKey, hashes: NDArray[np.uint64]) -> None:
        """The worker holds a prompt with these block hashes, which its event will tell."""
        if (expectation := self._expected.expect(worker, hashes, 0)) is not None:
            expectation.first_token()

    def weigh(self, request: Request, max_tokens: int, hashes: NDArray[np.uint64]) -> Weighing:
        """What `assign` would decide, without a trace."""
        return self._weigh(request, self._pool.generations(), max_tokens, hashes, math.inf)[0]

    def weigh_soonest(
        self, request: Request, max_tokens: int, hashes: NDArray[np.uint64], *, is_dated: bool = False
    ) -> Weighing:
        """The soonest first token. It is as if all workers were of one generation, because all share what waits
        before."""
        one = [Generation(request.weights, frozenset())]
        return self._weigh(request, one, max_tokens, hashes, due_ms=0.0, is_dated=is_dated)[0]

    def _weigh(
        self,
        request: Request,
        generations: Sequence[Generation],
        max_tokens: int,
        hashes: NDArray[np.uint64],
        due_ms: float,
        *,
        is_dated: bool = False,
    ) -> tuple[Weighing, bytes]:
        """Also returns the last block (sequence hash, u64 LE) of the prefix that some worker holds; empty when none
        does."""
        config = self._config
        forms = of_each_generation(request, generations)
        decode = prefill = NO_CANDIDATES
        may_keep, whose = False, (request.adapter, request.excluded)
        reused = b""
        if forms and (decode_keys := self._pool.decode_keys(max_tokens, *whose)):
            match = self._index.match(hashes)
            reused = match.last_block
            cached = self._expected.outlook(match, hashes)
            prefill_keys = self._pool.prefill_keys(request.num_tokens, *whose)
            later_than = request.num_tokens if is_dated else None
            may_keep = self._pool.prefill_keys(max_tokens, *whose) == prefill_keys
            decode = candidates(self._ledger, decode_keys, match, cached, later_than)
            prefill = candidates(self._ledger, prefill_keys, match, cached, later_than)
        limits = (config.max_running_per_worker, due_ms)
        weighings = [
            weigh(form, decode, prefill, self.weights, self._rng, *limits, may_keep=may_keep)
            for form in forms or [request]
        ]
        return best_generation(weighings, due_ms) if len(forms) > 1 else weighings[0], reused


def candidates(
    ledger: LoadLedger,
    workers: tuple[WorkerKey, ...],
    match: Match,
    cached: Mapping[WorkerKey, int],
    later_than: int | None = None,
) -> Candidates:
    """The workers with what they hold of a prompt, and with what they hold or are expected to hold (`cached`).
    `later_than`: leave out what waits behind a prompt of so many tokens."""
    if not workers:
        return NO_CANDIDATES
    blocks, lower = column(cached, workers), match.lower(workers)
    if lower.size and cached is not match:
        lower[:, blocks > match.column(workers)] = 0  # a prompt that goes on behind them brings them to the device
    restoring = ledger.restoring(workers) if lower.size else NO_RATES
    load = ledger.columns(workers) if later_than is None else ledger.columns_before(workers, later_than)
    facts = load, ledger.times(workers), lower, ledger.now_us
    return Candidates(workers, blocks, *facts, restoring)
