"""Turns a conversation trace into the block stream of W workers.

Request i goes to worker i mod W, which looks the prompt up in its cache, evicts blocks if it must, and stores the rest.
Each hash id of the trace (512 tokens) stands for 32 blocks of 16 tokens. A cache holds 1M tokens and evicts the least
recently used leaf first.
"""

import gzip
import json
from collections import OrderedDict
from pathlib import Path

import numpy as np

from benchmarks.routing.inputs import BLOCK_SIZE, BLOCKS_PER_ID

CACHE_BLOCKS = 1_000_000 // BLOCK_SIZE


def write_stream(folder: Path, trace: Path, num_requests: int, num_workers: int) -> None:
    caches = [_Cache() for _ in range(num_workers)]
    hits: list[int] = []
    removed: list[int] = []
    removed_ends: list[int] = []
    requests = _read_trace(trace, num_requests)
    for request, ids in enumerate(requests):
        hit, evicted = caches[request % num_workers].run(ids)
        hits.append(hit)
        removed += evicted
        removed_ends.append(len(removed))
    np.savez(
        folder / f"stream-{num_workers}.npz",
        ids=np.array([one for ids in requests for one in ids], dtype=np.uint64),
        id_ends=np.cumsum([len(ids) for ids in requests]),
        hits=np.array(hits),
        removed=np.array(removed, dtype=np.uint64),
        removed_ends=np.array(removed_ends),
    )


def write_trace_ids(folder: Path, trace: Path, num_blocks: int) -> None:
    """Runs of hash ids that no earlier request has, each with the id before it, up to `num_blocks` distinct blocks."""
    seen: set[int] = set()
    runs: list[list[int]] = []
    for ids in _read_trace(trace, None):
        known = next((i for i, one in enumerate(ids) if one not in seen), len(ids))
        new = ids[known : known + num_blocks // BLOCKS_PER_ID - len(seen)]
        if new:
            runs.append([ids[known - 1] if known else -1, *new])
            seen.update(new)
        if len(seen) >= num_blocks // BLOCKS_PER_ID:
            break
    (folder / "runs.json").write_text(json.dumps(runs))


def _read_trace(trace: Path, num_requests: int | None) -> list[list[int]]:
    with gzip.open(trace, "rt") as lines:
        return [json.loads(line)["hash_ids"] for _, line in zip(range(num_requests or 10**9), lines, strict=False)]


class _Cache:
    """A worker's prefix cache. It holds the first n blocks of an id, and n is all that it records."""

    def __init__(self) -> None:
        # id -> number of its blocks; least recently used first, children before parents
        self._held: OrderedDict[int, int] = OrderedDict()
        self._used = 0

    def run(self, ids: list[int]) -> tuple[int, list[int]]:
        """Runs one request. Returns how many of its blocks were cached, and the numbers of the evicted blocks."""
        hit = 0
        while hit < len(ids) * BLOCKS_PER_ID:
            held = self._held.get(ids[hit // BLOCKS_PER_ID], 0)
            hit += held
            if held < BLOCKS_PER_ID:
                break
        needed = len(ids) * BLOCKS_PER_ID - hit
        for one in reversed(ids[: -(-hit // BLOCKS_PER_ID)]):
            self._held.move_to_end(one)
        evicted = self._evict(self._used + needed - CACHE_BLOCKS)
        for one in reversed(ids):
            self._held[one] = BLOCKS_PER_ID
            self._held.move_to_end(one)
        self._used += needed
        return hit, evicted

    def _evict(self, count: int) -> list[int]:
        gone: list[int] = []
        while len(gone) < count:
            one, held = next(iter(self._held.items()))
            left = max(0, held - (count - len(gone)))
            gone += range(one * BLOCKS_PER_ID + held - 1, one * BLOCKS_PER_ID + left - 1, -1)
            if left:
                self._held[one] = left
            else:
                del self._held[one]
        self._used -= len(gone)
        return gone
