"""Dynamo's half: its Python binding, called as Dynamo's components call it. Runs in the peer's environment.

    PEER/bin/python -m benchmarks.routing.dynamo_half

Prompts and queries are lists of int and events are JSON bytes, because the binding takes these. Making them is not
timed.
"""

import json
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from dynamo.llm import RadixTree, compute_block_hash_for_seq  # type: ignore[import-not-found]

from benchmarks.routing.dynamo_router import DynamoRouter
from benchmarks.routing.half import serve
from benchmarks.routing.inputs import BLOCK_SIZE, MAX_TOKENS, Hashes, Run, Stream, chain_runs, read_tokens, stream_runs
from benchmarks.routing.timing import rss_bytes, sample_us


class DynamoHalf:
    _tree: Any
    _stream: Stream
    _hashes: list[int]
    _router: DynamoRouter | None = None

    def versions(self) -> dict[str, str]:
        return {"ai-dynamo-runtime": version("ai-dynamo-runtime"), "python": sys.version.split()[0]}

    def hash(self, folder: str, num_tokens: int, budget_s: float) -> dict[str, Any]:
        tokens = read_tokens(Path(folder), num_tokens).tolist()
        hashes = compute_block_hash_for_seq(tokens, BLOCK_SIZE)
        samples = sample_us(lambda: compute_block_hash_for_seq(tokens, BLOCK_SIZE), budget_s)
        return {"us": samples, "check": [hashes[0], hashes[-1], len(hashes)]}

    def share_prefix(self, folder: str, num_workers: int) -> None:
        """Makes a tree in which each of the workers holds the whole prompt."""
        self._hashes = compute_block_hash_for_seq(read_tokens(Path(folder), MAX_TOKENS).tolist(), BLOCK_SIZE)
        hashes = np.array(self._hashes, dtype=np.uint64)
        event = _stored(Run(None, hashes, hashes))
        self._tree = RadixTree()
        for worker in range(num_workers):
            self._tree.apply_event(worker, event)

    def find(self, num_tokens: int, named: bool, budget_s: float) -> dict[str, Any]:
        """`named`: the score of each worker is read too."""
        tree, query = self._tree, self._hashes[: num_tokens // BLOCK_SIZE]
        samples = sample_us(
            (lambda: tree.find_matches(query).scores) if named else (lambda: tree.find_matches(query)), budget_s
        )
        scores = tree.find_matches(query).scores
        return {"us": samples, "check": sorted(Counter(scores.values()).items())}

    def open_stream(self, folder: str, num_workers: int) -> None:
        self._stream, self._tree = Stream(Path(folder), num_workers), RadixTree()

    def run_stream(self, first: int, last: int) -> list[list[float]]:
        """Per request: us to find, us to apply, number of events, blocks in them, sum of the scores of all workers."""
        rows: list[list[float]] = []
        tree, clock = self._tree, time.perf_counter_ns
        for request in range(first, last):
            step = self._stream.step(request)
            query = step.query.tolist()
            events = []
            if len(step.removed):
                events.append(_removed(step.removed))
            if step.stored is not None:
                events.append(_stored(step.stored))
            begin_ns = clock()
            found = tree.find_matches(query)
            found_ns = clock()
            for event in events:
                tree.apply_event(step.worker, event)
            applied_ns = clock()
            blocks = len(step.removed) + (len(step.stored.blocks) if step.stored else 0)
            times_us = [(found_ns - begin_ns) / 1e3, (applied_ns - found_ns) / 1e3]
            rows.append([*times_us, len(events), blocks, sum(found.scores.values())])
        return rows

    def open_router(self, folder: str, num_workers: int, loop: str) -> None:
        self._router = DynamoRouter(Path(folder), num_workers, loop)

    def decide(self, num_tokens: int, budget_s: float) -> dict[str, Any]:
        assert self._router is not None, "opened first"
        return self._router.decide(num_tokens, budget_s)

    def close_router(self) -> None:
        """Closes the router, if one is open."""
        if self._router is not None:
            self._router.close()
            self._router = None

    def memory(self, folder: str, shape: str, num_blocks: int, num_workers: int) -> list[int]:
        """Growth of the process in bytes after each worker; all hold the same blocks. Call it in a fresh process."""
        tree = RadixTree()
        tree.apply_event(0, _stored(next(chain_runs(1024))))
        tree.remove_worker(0)
        before = rss_bytes()
        grown: list[int] = []
        for worker in range(num_workers):
            for run in chain_runs(num_blocks) if shape == "chain" else stream_runs(Path(folder)):
                tree.apply_event(worker, _stored(run))
            grown.append(rss_bytes() - before)
        return grown


def _stored(run: Run) -> bytes:
    pairs = zip(run.sequences.tolist(), run.blocks.tolist(), strict=True)
    blocks = [{"block_hash": sequence, "tokens_hash": block} for sequence, block in pairs]
    return _event({"stored": {"parent_hash": run.parent, "blocks": blocks}})


def _removed(sequences: Hashes) -> bytes:
    return _event({"removed": {"block_hashes": sequences.tolist()}})


def _event(data: dict[str, Any]) -> bytes:
    return json.dumps({"event_id": 1, "data": data}, separators=(",", ":")).encode()


if __name__ == "__main__":
    half = DynamoHalf()
    try:
        serve(half)
    finally:
        half.close_router()
