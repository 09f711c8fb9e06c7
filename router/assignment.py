"""The router's whole decision for one attempt: match the prefix, list the candidates, place, charge. No await: what one
request was charged, the next one sees."""

import random
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baton.config import RouterConfig
from baton_proto.worker import PrefillTarget
from router.load import Charge, LoadLedger
from router.match import WorkerKey
from router.placement import Candidate, Placement, Request, place
from router.worker_link import WorkerLink
from router.worker_pool import PooledWorker, WorkerPool


class PrefixIndex(Protocol):
    """What the decision needs of the indexer."""

    def match(self, hashes: NDArray[np.uint64]) -> Mapping[WorkerKey, int]:
        """How many leading blocks of a prompt each worker holds; workers without any may be left out."""
        ...


class Assignment:
    """The workers of one attempt, charged until `release`."""

    __slots__ = ("charge", "link", "placement", "prefill")

    def __init__(self, link: WorkerLink, prefill: PrefillTarget | None, placement: Placement, charge: Charge) -> None:
        self.link = link
        self.prefill = prefill
        self.placement = placement
        self.charge = charge

    def release(self) -> None:
        self.charge.release()


class Assigner:
    def __init__(
        self,
        pool: WorkerPool,
        index: PrefixIndex,
        ledger: LoadLedger,
        config: RouterConfig,
        rng: random.Random | None = None,
    ) -> None:
        self._pool = pool
        self._index = index
        self._ledger = ledger
        self._config = config
        self._rng = rng or random.Random()

    def assign(
        self, request_id: str, request: Request, max_tokens: int, hashes: NDArray[np.uint64]
    ) -> Assignment | None:
        """None: no workers can take it now. `max_tokens`: prompt and the longest possible output."""
        decode = self._pool.ready_decode(max_tokens)
        if not decode:
            return None
        cached = self._index.match(hashes)
        prefill = self._pool.ready_prefill(request.num_tokens)
        decode_candidates = self._decode_candidates(decode, cached)
        prefill_candidates = [self._candidate(worker.key, cached, decodes=False) for worker in prefill]
        placement = place(request, decode_candidates, prefill_candidates, self._config.placement, self._rng)
        if placement is None:
            return None
        uncached = request.num_tokens - placement.cached_blocks * request.block_size
        charge = self._ledger.charge(request_id, placement.decode, placement.prefill, request.num_tokens, uncached)
        target = self._pool.prefill_target(placement.prefill) if placement.prefill else None
        return Assignment(self._pool.link(placement.decode), target, placement, charge)

    def _decode_candidates(self, workers: list[PooledWorker], cached: Mapping[WorkerKey, int]) -> list[Candidate]:
        """Those with room for one more request."""
        limit = self._config.max_running_per_worker
        return [
            self._candidate(worker.key, cached, decodes=True)
            for worker in workers
            if self._ledger.view(worker.key).requests < limit
        ]

    def _candidate(self, key: WorkerKey, cached: Mapping[WorkerKey, int], decodes: bool) -> Candidate:
        load = self._ledger.view(key)
        return Candidate(
            worker=key,
            cached_blocks=cached.get(key, 0),
            queued_prefill_tokens=load.queued_prefill_tokens,
            active_blocks=load.active_blocks if decodes else 0,
            stored_blocks=self._ledger.stored_blocks(key),
        )
