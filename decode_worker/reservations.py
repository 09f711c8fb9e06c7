"""Requests that wait for KV blocks, and the moment when they get them and a lease. Engine thread only."""

import bisect
import time
from collections.abc import Callable

from decode_worker.request import Request
from engine.core.engine import Engine
from kvtransfer.decode_side.receiver import Receiver

MIN_TTL_S = 1.0  # of a request that is almost out of time; its own deadline ends it


class Reservations:
    """Higher priority first, then first come, first served: no long prompt is overtaken by short ones until it starves.

    `granted(request)` is called when `request.grant` is set. Whoever frees blocks calls `retry`.
    """

    def __init__(
        self,
        engine: Engine,
        receiver: Receiver,
        block_size: int,
        lease_ttl_s: float,
        granted: Callable[[Request], None],
    ) -> None:
        self._engine = engine
        self._receiver = receiver
        self._block_size = block_size
        self._lease_ttl_s = lease_ttl_s
        self._granted = granted
        self._waiting: list[Request] = []

    def add(self, request: Request) -> None:
        bisect.insort_right(self._waiting, request, key=lambda waiting: -waiting.submit.priority)
        self.retry()

    def cancel(self, request: Request) -> None:
        """Nothing to do when it has its blocks already: the lease is cancelled by whoever ended the request."""
        if request in self._waiting:
            self._waiting.remove(request)
            self.retry()

    def retry(self) -> None:
        while self._waiting and self._engine.reserve(self._waiting[0].sequence):
            self._lease(self._waiting.pop(0))

    def _lease(self, request: Request) -> None:
        sequence = request.sequence
        skip_tokens = sequence.num_computed_tokens  # our own cached prefix, whole blocks
        num_blocks = -(-len(sequence.token_ids) // self._block_size)
        ttl_s = min(self._lease_ttl_s, max(MIN_TTL_S, request.deadline_s - time.monotonic()))
        block_ids = sequence.block_table[skip_tokens // self._block_size : num_blocks]
        request.grant = self._receiver.reserve(block_ids, skip_tokens, ttl_s)
        self._granted(request)
