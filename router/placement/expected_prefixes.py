"""Prompts that were sent to a worker whose events have not told of them yet: a burst of siblings follows the first.

What a prompt adds to its worker's cache counts as cached there from the moment it is placed, until the worker's event
comes, the request ends without a token, or its time is over. Usually empty or small, and costs next to nothing then.
No I/O; event loop only.

While the prompt is still to be computed, it stands in its worker's queue, and a sibling waits for it there.

A trie of runs like the radix tree, but with workers only on what they do not hold yet.
"""

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from baton_proto.kv_events import HASH_BYTES
from router.index.edge import Run
from runtime.discovery.worker_key import WorkerKey
from runtime.fair_queue import one_less

# A prompt counts as cached for so long at most without an event. A long one waits and is computed within half a minute
# on a busy worker, and an engine that tells no events must not attract siblings for longer.
TTL_S = 30.0
EVENT_GRACE_S = 1.0  # the event of a prompt is seldom later than its first token, and never by much
MAX_WAITING = 1024  # prompts without a first token; beyond that the oldest is no longer expected
MAX_RUNS = 32  # that a query follows: prompts that branch off one another after every block must not hold up the router


class _Node(Run):
    """It stays while an expectation ends in it or below it."""

    __slots__ = ("ending", "workers")

    def __init__(self, parent: "_Node | None", blocks: bytes) -> None:
        super().__init__(parent, blocks)
        self.workers: Counter[WorkerKey] = Counter()  # expectations that cover the run; no zeros
        self.ending = 0  # expectations that begin or end right behind the run


class Expectation:
    """One prompt on its way into one worker's cache."""

    __slots__ = ("_owner", "begin", "end", "expires_s", "worker")

    def __init__(
        self, owner: "ExpectedPrefixes", worker: WorkerKey, begin: _Node, end: _Node, expires_s: float
    ) -> None:
        self.worker = worker
        self.begin = begin  # what the worker holds already ends here
        self.end = end
        self.expires_s = expires_s
        self._owner = owner
        begin.ending += 1
        end.ending += 1
        for node in self.covered():
            node.workers[worker] += 1

    def covered(self) -> list[_Node]:
        nodes = []
        node = self.end
        while node is not self.begin:
            nodes.append(node)
            assert node.parent is not None, "an expectation begins above its end"
            node = node.parent
        return nodes

    @property
    def last_block(self) -> bytes:
        return self.end.blocks[-HASH_BYTES:]

    def first_token(self) -> None:
        """The prompt was computed: its event is on its way, if there is one at all."""
        self._owner.first_token(self)

    def cancel(self) -> None:
        """The request has ended. Without a first token nothing more is to be expected."""
        self._owner.cancel(self)


class ExpectedPrefixes:
    def __init__(self, ttl_s: float = TTL_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._root = _Node(None, b"")
        self._waiting: OrderedDict[Expectation, None] = OrderedDict()  # for a first token; the oldest is first
        self._computed: deque[Expectation] = deque()  # the first to expire is first; may hold what is gone
        self._by_end: dict[tuple[WorkerKey, bytes], set[Expectation]] = {}

    @property
    def count(self) -> int:
        return sum(map(len, self._by_end.values()))

    def expect(self, worker: WorkerKey, hashes: NDArray[np.uint64], known_blocks: int) -> Expectation | None:
        """A prompt with these block hashes is sent to a worker that holds the first `known_blocks` of them. None when
        there is nothing new in it, or nothing is ever expected."""
        if known_blocks >= len(hashes) or not self._ttl_s:
            return None
        self._expire()
        if len(self._waiting) >= MAX_WAITING:
            self._remove(next(iter(self._waiting)))
        path = hashes.tobytes()
        begin = self._descend(self._root, path[: known_blocks * HASH_BYTES])
        end = self._descend(begin, path[known_blocks * HASH_BYTES :])
        expectation = Expectation(self, worker, begin, end, self._clock() + self._ttl_s)
        self._waiting[expectation] = None
        self._by_end.setdefault((worker, expectation.last_block), set()).add(expectation)
        return expectation

    def outlook(self, cached: Mapping[WorkerKey, int], hashes: NDArray[np.uint64]) -> Mapping[WorkerKey, int]:
        """Leading blocks of a prompt that each worker holds or is expected to hold. `cached`: those that it holds, as
        the radix tree has them; returned itself when nothing more is expected."""
        if not self._root.children:
            return cached
        self._expire()
        expected: dict[WorkerKey, int] = {}
        query = hashes.tobytes()
        node, position = self._root, 0
        for _ in range(MAX_RUNS):
            step = node.step(query, position)
            if step is None:
                break
            node, length = step
            position += length
            for worker in node.workers:
                expected[worker] = position // HASH_BYTES
            if length < len(node.blocks):
                break
        more = {worker: blocks for worker, blocks in expected.items() if blocks > cached.get(worker, 0)}
        return {**cached, **more} if more else cached

    def stored(self, worker: WorkerKey, block_hashes: bytes) -> None:
        """The worker's event: it holds a run of blocks (u64 LE)."""
        for expectation in list(self._by_end.get((worker, block_hashes[-HASH_BYTES:]), ())):
            self._remove(expectation)

    def forget(self, worker: WorkerKey) -> None:
        """The worker is gone."""
        for expectation in [e for (of, _), ending in self._by_end.items() if of == worker for e in ending]:
            self._remove(expectation)

    # --- for expectations ---------------------------------------------------------------------------------------------

    def first_token(self, expectation: Expectation) -> None:
        if expectation in self._waiting:
            del self._waiting[expectation]
            expectation.expires_s = self._clock() + EVENT_GRACE_S
            self._computed.append(expectation)

    def cancel(self, expectation: Expectation) -> None:
        if expectation in self._waiting:
            self._remove(expectation)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        now = self._clock()
        while self._waiting and (oldest := next(iter(self._waiting))).expires_s <= now:
            self._remove(oldest)
        while self._computed and self._computed[0].expires_s <= now:
            self._remove(self._computed.popleft())

    def _descend(self, node: _Node, path: bytes) -> _Node:
        """The node where `path` ends, counted from behind `node`; makes what is missing."""
        position = 0
        while position < len(path):
            step = node.step(path, position)
            if step is None:
                return _Node(node, path[position:])
            child, shared = step
            node = child if shared == len(child.blocks) else self._split(child, shared)
            position += shared
        return node

    def _split(self, node: _Node, length: int) -> _Node:
        """Puts a node with the first `length` bytes of the run above it; whoever ends at the node ends there still."""
        upper = _Node(node.parent, node.blocks[:length])
        upper.workers = node.workers.copy()
        node.parent, node.blocks = upper, node.blocks[length:]
        node.attach()
        return upper

    def _remove(self, expectation: Expectation) -> None:
        key = (expectation.worker, expectation.last_block)
        ending = self._by_end.get(key, set())
        if expectation not in ending:
            return
        ending.remove(expectation)
        if not ending:
            del self._by_end[key]
        self._waiting.pop(expectation, None)
        for node in expectation.covered():
            one_less(node.workers, expectation.worker)
        for node in (expectation.end, expectation.begin):
            node.ending -= 1
            self._prune(node)

    def _prune(self, node: _Node) -> None:
        """Takes out what no expectation needs any more. Splits stay until then."""
        while node.parent is not None and not node.children and not node.ending:
            node.detach()
            node = node.parent
