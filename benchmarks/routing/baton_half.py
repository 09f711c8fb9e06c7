"""Baton's half: the router's own parts, called as the router calls them.

    python -m benchmarks.routing.baton_half

Prompts and queries are numpy arrays; events are msgpack batches of one event, as they come from NATS. Encoding them is
not timed, decoding them is.
"""

import platform
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from baton_proto.kv_events import (
    DISK,
    HOST,
    MAJOR,
    Cleared,
    KvEvent,
    KvEventBatch,
    Moved,
    Removed,
    Stored,
    decode_batch,
    encode_batch,
)
from benchmarks.routing.baton_router import BatonRouter
from benchmarks.routing.half import serve
from benchmarks.routing.inputs import (
    BLOCK_SIZE,
    MAX_TOKENS,
    Hashes,
    Run,
    Stream,
    chain_runs,
    read_tokens,
    stream_runs,
)
from benchmarks.routing.timing import rss_bytes, sample_us
from router.index.radix_tree import RadixTree
from runtime.blocks.block_hash import sequence_hashes
from runtime.blocks.xxh3 import block_hashes
from runtime.discovery.worker_key import WorkerKey


class BatonHalf:
    _tree: RadixTree
    _stream: Stream
    _hashes: Hashes
    _router: BatonRouter

    def versions(self) -> dict[str, str]:
        packages = {name: version(name) for name in ("baton-serve", "numpy", "xxhash", "msgspec")}
        return {"python": platform.python_version(), **packages}

    def hash(self, folder: str, num_tokens: int, budget_s: float) -> dict[str, Any]:
        tokens = read_tokens(Path(folder), num_tokens)
        hashes = block_hashes(tokens, BLOCK_SIZE)
        samples = sample_us(lambda: block_hashes(tokens, BLOCK_SIZE), budget_s)
        return {"us": samples, "check": [int(hashes[0]), int(hashes[-1]), len(hashes)]}

    def share_prefix(self, folder: str, num_workers: int) -> None:
        """Makes a tree in which each of the workers holds the whole prompt."""
        self._hashes = block_hashes(read_tokens(Path(folder), MAX_TOKENS), BLOCK_SIZE)
        self._tree = RadixTree()
        event = stored(Run(None, self._hashes, sequence_hashes(self._hashes)))
        for number in range(num_workers):
            self._tree.apply(worker(number), event)

    def find(self, num_tokens: int, named: bool, budget_s: float) -> dict[str, Any]:
        """`named`: the score of each worker is read too, as placement reads it."""
        tree, query, workers = self._tree, self._hashes[: num_tokens // BLOCK_SIZE], tuple(self._tree.workers)
        samples = sample_us(
            (lambda: tree.find(query).column(workers)) if named else (lambda: tree.find(query)), budget_s
        )
        return {"us": samples, "check": sorted(Counter(tree.find(query).values()).items())}

    def open_stream(self, folder: str, num_workers: int) -> None:
        self._stream, self._tree = Stream(Path(folder), num_workers), RadixTree()

    def run_stream(self, first: int, last: int) -> list[list[float]]:
        """Per request: us to find, us to apply, number of events, blocks in them, sum of the scores of all workers."""
        rows: list[list[float]] = []
        tree, clock = self._tree, time.perf_counter_ns
        for request in range(first, last):
            step = self._stream.step(request)
            query, key = step.query, worker(step.worker)
            batches = []
            if len(step.removed):
                batches.append(encoded(Removed(step.removed.tobytes())))
            if step.stored is not None:
                batches.append(encoded(stored(step.stored)))
            begin_ns = clock()
            found = tree.find(query)
            found_ns = clock()
            score = sum(found.values())
            apply_ns = clock()
            for batch in batches:
                for event in decode_batch(batch).events:
                    tree.apply(key, event)
            applied_ns = clock()
            blocks = len(step.removed) + (len(step.stored.blocks) if step.stored else 0)
            times_us = [(found_ns - begin_ns) / 1e3, (applied_ns - apply_ns) / 1e3]
            rows.append([*times_us, len(batches), blocks, score])
        return rows

    def open_router(self, folder: str, num_workers: int, shipped: bool = False) -> None:
        self._router = BatonRouter(Path(folder), num_workers, shipped)

    def decide(self, num_tokens: int, budget_s: float) -> dict[str, Any]:
        return self._router.decide(num_tokens, budget_s)

    def memory(self, folder: str, shape: str, num_blocks: int, num_workers: int) -> list[int]:
        """Growth of the process in bytes after each worker; all hold the same blocks. Call it in a fresh process."""
        tree = RadixTree()
        begin_tree(tree)
        before = rss_bytes()
        grown: list[int] = []
        for number in range(num_workers):
            for run in chain_runs(num_blocks) if shape == "chain" else stream_runs(Path(folder)):
                tree.apply(worker(number), stored(run))
            grown.append(rss_bytes() - before)
        return grown

    def memory_of_homes(self, num_blocks: int) -> int:
        """Growth of the process in bytes by prefixes of 32 blocks, of which 16 lie on the device of a worker, 8 in its
        host memory and 8 on its disk. Call it in a fresh process."""
        tree = RadixTree()
        begin_tree(tree)
        before = rss_bytes()
        for run in chain_runs(num_blocks):
            for start in range(0, len(run.blocks), 32):
                sequences = run.sequences[start : start + 32].astype("<u8")
                tree.apply(worker(0), stored(Run(None, run.blocks[start : start + 32], sequences)))
                tree.apply(worker(0), Moved(sequences[24:].tobytes(), DISK))
                tree.apply(worker(0), Moved(sequences[16:24].tobytes(), HOST))
        return rss_bytes() - before


def begin_tree(tree: RadixTree) -> None:
    """The tree takes what it needs once."""
    tree.apply(worker(0), stored(next(chain_runs(1024))))
    tree.apply(worker(0), Cleared())


def worker(number: int) -> WorkerKey:
    return (f"worker-{number}", 1)


def stored(run: Run) -> Stored:
    return Stored(run.parent, run.blocks.astype("<u8").tobytes(), run.sequences.astype("<u8").tobytes())


def encoded(event: KvEvent) -> bytes:
    return encode_batch(KvEventBatch(MAJOR, "worker-0", 1, 1, 0.0, [event]))


if __name__ == "__main__":
    np.seterr(over="ignore")
    serve(BatonHalf())
