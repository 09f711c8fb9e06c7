"""The router's whole decision for one attempt: match the prefix, list the candidates, place, charge. No await: what one
request was charged, the next one sees."""

import random
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baton.config import RouterConfig
from baton_proto.worker import PrefillTarget
from router.load import Charge, LoadLedger
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

    __slots__ = ("charge", "full", "link", "placement", "prefill")

    def __init__(
        self,
        link: WorkerLink,
        prefill: PrefillTarget | None,
        placement: Placement,
        full: list[WorkerKey],
        charge: Charge,
    ) -> None:
        self.link = link
        self.prefill = prefill
        self.placement = placement
        self.full = full  # decode workers that had no room
        self.charge = charge

    def release(self) -> None:
        self.charge.release()


class Assigner:
    """`placed` is called when the prompt that was matched last got its workers."""

    def __init__(
        self,
        pool: WorkerPool,
        index: PrefixIndex,
        ledger: LoadLedger,
        config: RouterConfig,
        rng: random.Random | None = None,
    ) -> None:
        self.placed: Callable[[], None] = lambda: None
        self._pool = pool
        self._index = index
        self._ledger = ledger
        self._config = config
        self._rng = rng or random.Random()

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
        return Assignment(self._pool.link(placement.decode), target, placement, full, charge)

    def weigh(self, request: Request, max_tokens: int, hashes: NDArray[np.uint64]) -> tuple[Weighing, list[WorkerKey]]:
        """What `assign` would decide, without a trace; and the decode workers that have no room for another request."""
        full: list[WorkerKey] = []
        decode = self._pool.ready_decode(max_tokens)
        if not decode:
            return NOBODY, full
        cached = self._index.match(hashes)
        decode_candidates = self._decode_candidates(decode, cached, full)
        prefill_candidates = [
            Candidate(worker.key, cached.get(worker.key, 0), self._ledger.view(worker.key).queued_prefill_tokens, 0)
            for worker in self._pool.ready_prefill(request.num_tokens)
        ]
        return weigh(request, decode_candidates, prefill_candidates, self._config.placement, self._rng), full

    def _decode_candidates(
        self, workers: list[PooledWorker], cached: Mapping[WorkerKey, int], full: list[WorkerKey]
    ) -> list[Candidate]:
        """Those with room for one more request; the others are added to `full`."""
        candidates = []
        for worker in workers:
            load = self._ledger.view(worker.key)
            if load.requests < self._config.max_running_per_worker:
                blocks = cached.get(worker.key, 0)
                candidates.append(Candidate(worker.key, blocks, load.queued_prefill_tokens, load.active_blocks))
            else:
                full.append(worker.key)
        return candidates
