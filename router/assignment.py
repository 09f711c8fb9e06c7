"""The router's whole decision for one attempt: match the prefix, list the candidates, place, charge. No await: what one
request was charged, the next one sees."""

import random
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baton.config import RouterConfig
from baton_proto.worker import PrefillTarget
from router.expected_prefixes import Expectation, ExpectedPrefixes, Outlook
from router.load import Charge, LoadLedger, LoadView
from router.match import WorkerKey
from router.placement import Candidate, Placement, Request, Weighing, weigh
from router.worker_link import WorkerLink
from router.worker_pool import PooledWorker, WorkerPool

NOBODY = Weighing([], [], None, None, alone=True)


class PrefixIndex(Protocol):
    """What the decision needs of the indexer."""

    def match(self, hashes: NDArray[np.uint64]) -> Mapping[WorkerKey, int]:
        """How many leading blocks of a prompt each worker holds; workers without any may be left out."""
        ...


class Assignment:
    """The workers of one attempt, charged until `release`."""

    __slots__ = ("charge", "expectation", "full", "link", "placement", "prefill")

    def __init__(
        self,
        link: WorkerLink,
        prefill: PrefillTarget | None,
        placement: Placement,
        full: list[WorkerKey],
        charge: Charge,
        expectation: Expectation | None,
    ) -> None:
        self.link = link
        self.prefill = prefill
        self.placement = placement
        self.full = full  # decode workers that had no room
        self.charge = charge
        self.expectation = expectation  # of the worker that runs the prompt; None: it holds all of it

    def prefill_done(self) -> None:
        """At the first token."""
        self.charge.prefill_done()
        if self.expectation is not None:
            self.expectation.first_token()

    def release(self) -> None:
        self.charge.release()
        if self.expectation is not None:
            self.expectation.cancel()


class Assigner:
    """`placed` is called when the prompt that was matched last got its workers."""

    def __init__(
        self,
        pool: WorkerPool,
        index: PrefixIndex,
        ledger: LoadLedger,
        config: RouterConfig,
        rng: random.Random | None = None,
        expected: ExpectedPrefixes | None = None,
    ) -> None:
        self.placed: Callable[[], None] = lambda: None
        self._pool = pool
        self._index = index
        self._ledger = ledger
        self._config = config
        self._rng = rng or random.Random()
        self._expected = ExpectedPrefixes(config.placement.expected_prefix_ttl_s) if expected is None else expected

    def assign(
        self, request_id: str, request: Request, max_tokens: int, hashes: NDArray[np.uint64]
    ) -> Assignment | None:
        """None: no workers can take it now. `max_tokens`: prompt and the longest possible output."""
        weighing, full = self.weigh(request, max_tokens, hashes)
        placement = weighing.placement()
        if placement is None:
            return None
        self.placed()
        uncached = request.num_tokens - placement.cached_blocks * request.block_size
        charge = self._ledger.charge(request_id, placement.decode, placement.prefill, request.num_tokens, uncached)
        target = self._pool.prefill_target(placement.prefill) if placement.prefill else None
        expectation = self._expected.expect(placement.prefill or placement.decode, hashes, placement.cached_blocks)
        return Assignment(self._pool.link(placement.decode), target, placement, full, charge, expectation)

    def weigh(self, request: Request, max_tokens: int, hashes: NDArray[np.uint64]) -> tuple[Weighing, list[WorkerKey]]:
        """What `assign` would decide, without a trace; and the decode workers that have no room for another request."""
        full: list[WorkerKey] = []
        decode = self._pool.ready_decode(max_tokens)
        if not decode:
            return NOBODY, full
        outlook = self._expected.outlook(self._index.match(hashes), hashes)
        decode_candidates = self._decode_candidates(decode, outlook, request.block_size, full)
        prefill_candidates = [
            _candidate(worker, self._ledger.view(worker.key), outlook, request.block_size)
            for worker in self._pool.ready_prefill(request.num_tokens)
        ]
        return weigh(request, decode_candidates, prefill_candidates, self._config.placement, self._rng), full

    def _decode_candidates(
        self, workers: list[PooledWorker], outlook: Outlook, block_size: int, full: list[WorkerKey]
    ) -> list[Candidate]:
        """Those with room for one more request; the others are added to `full`."""
        candidates = []
        for worker in workers:
            load = self._ledger.view(worker.key)
            if load.requests < self._config.max_running_per_worker:
                candidates.append(_candidate(worker, load, outlook, block_size))
            else:
                full.append(worker.key)
        return candidates


def _candidate(worker: PooledWorker, load: LoadView, outlook: Outlook, block_size: int) -> Candidate:
    key = worker.key
    queued = load.queued_prefill_tokens
    if outlook.computing:
        queued = max(0, queued - outlook.computing.get(key, 0) * block_size)
    active_blocks = load.active_blocks if worker.record.role == "decode" else 0
    return Candidate(key, outlook.cached.get(key, 0), queued, active_blocks, load.requests)
