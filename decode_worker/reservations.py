"""Requests that wait for KV blocks, until they get blocks and a lease. Engine thread only."""

import bisect
import time
from collections import defaultdict
from collections.abc import Callable

from baton_proto.worker import PrefillTarget
from engine.interface import LOOK_AHEAD, KvEngine
from engine.sequences.sequence import Sequence
from kvtransfer.decode_side.receiver import Receiver
from worker.requests.request import Phase, Request

MIN_TTL_S = 1.0  # of a grant to a request that is almost out of time; the request's own deadline ends it


class Reservations:
    """Serves higher priority first, then first come, first served, so that short prompts do not starve a long one.

    A request whose prefix is being read from the disk is passed by others. So is one whose blocks are still being
    copied, and one whose prefix the same prefill worker ships for an earlier request: it comes once.
    `granted(request)` is called when `request.grant` is set. Nobody passes who waits for memory, but for those who
    have blocks: they may be what it waits for.
    Invariant: whatever frees blocks calls retry() afterwards, and so does whatever ends a request with a grant.
    """

    def __init__(
        self,
        engine: KvEngine,
        receiver: Receiver,
        block_size: int,
        lease_ttl_s: float,
        granted: Callable[[Request], None],
        first_window_block: int = 0,
    ) -> None:
        """first_window_block: the slab's id of the first block of layers with a window."""
        self._first_window_block = first_window_block
        self._engine = engine
        self._receiver = receiver
        self._block_size = block_size
        self._lease_ttl_s = lease_ttl_s
        self._granted = granted
        self._waiting: list[Request] = []
        self._arriving: list[Request] = []  # with a lease; may hold what has ended

    def add(self, request: Request) -> None:
        bisect.insort_right(self._waiting, request, key=lambda waiting: -waiting.submit.priority)
        self.retry()

    def cancel(self, request: Request) -> None:
        """No effect when the request has its blocks: the caller cancels the lease."""
        if request in self._waiting:
            self._waiting.remove(request)
            self._engine.forgo(request.sequence)
            self.retry()

    def followers(self, target: PrefillTarget) -> list[Request]:
        """Requests that wait for what this prefill worker ships for another one."""
        waiting = [request for request in self._waiting if request.submit.prefill == target]
        return [request for request in waiting if request.sequence.leader is not None]

    def retry(self) -> None:
        self._arriving = [request for request in self._arriving if request.is_arriving]
        leaders: defaultdict[PrefillTarget | None, list[Sequence]] = defaultdict(list)
        for request in self._arriving:
            leaders[request.submit.prefill].append(request.sequence)
        passed, is_over = 0, False
        for request in list(self._waiting):
            sequence, beside = request.sequence, leaders[request.submit.prefill]
            has_blocks = bool(sequence.block_table)  # which were still being copied
            if request.phase is Phase.ENDED or (not has_blocks and (is_over or self._engine.follows(sequence, beside))):
                continue
            if self._engine.reserve(sequence):
                self._waiting.remove(request)
                self._lease(request)
                beside.append(sequence)
            elif not sequence.block_table:
                passed += 1
                is_over = not self._engine.restores(sequence) or passed == LOOK_AHEAD

    def _lease(self, request: Request) -> None:
        sequence = request.sequence
        skip_tokens = sequence.num_computed_tokens  # our own cached prefix, whole blocks
        num_blocks = -(-len(sequence.token_ids) // self._block_size)
        ttl_s = min(self._lease_ttl_s, max(MIN_TTL_S, request.deadline_s - time.monotonic()))
        own = slice(skip_tokens // self._block_size, num_blocks)
        in_window = [self._first_window_block + block for block in sequence.window_table[own] if block]  # 0 is none
        block_ids = sequence.block_table[own] + in_window
        request.grant = self._receiver.reserve(block_ids, skip_tokens, ttl_s, len(in_window))
        self._arriving.append(request)
        self._granted(request)
