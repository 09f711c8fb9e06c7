"""Requests that wait for KV blocks, until they get blocks and a lease. Engine thread only."""

import bisect
import time
from collections.abc import Callable

from decode_worker.request import Request
from engine.core.engine import Engine
from engine.core.scheduler import LOOK_AHEAD
from kvtransfer.decode_side.receiver import Receiver

MIN_TTL_S = 1.0  # of a grant to a request that is almost out of time; the request's own deadline ends it


class Reservations:
    """Serves higher priority first, then first come, first served, so that short prompts do not starve a long one.

    A request whose prefix is being read from the disk is passed by others. `granted(request)` is called when
    `request.grant` is set. Invariant: whatever frees blocks calls retry() afterwards.
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
        """No effect when the request has its blocks: the caller cancels the lease."""
        if request in self._waiting:
            self._waiting.remove(request)
            self._engine.forgo(request.sequence)
            self.retry()

    def retry(self) -> None:
        passed = 0
        while passed < min(LOOK_AHEAD, len(self._waiting)):
            sequence = self._waiting[passed].sequence
            if self._engine.reserve(sequence):
                self._lease(self._waiting.pop(passed))
            elif self._engine.block_manager.restores(sequence):
                passed += 1
            else:
                return

    def _lease(self, request: Request) -> None:
        sequence = request.sequence
        skip_tokens = sequence.num_computed_tokens  # our own cached prefix, whole blocks
        num_blocks = -(-len(sequence.token_ids) // self._block_size)
        ttl_s = min(self._lease_ttl_s, max(MIN_TTL_S, request.deadline_s - time.monotonic()))
        block_ids = sequence.block_table[skip_tokens // self._block_size : num_blocks]
        request.grant = self._receiver.reserve(block_ids, skip_tokens, ttl_s)
        self._granted(request)
