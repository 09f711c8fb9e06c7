"""The block stream of the router benchmark against a cache that remembers every block by itself."""

import gzip
import json
import random
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from benchmarks.routing import stream_writer
from benchmarks.routing.inputs import BLOCKS_PER_ID, Stream, blocks_of, sequences_of
from benchmarks.routing.stream_writer import write_stream

NUM_WORKERS = 2


class BlockCache:
    """Blocks in the order in which they go: least recently used first, of one request the deepest first."""

    def __init__(self, capacity: int) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._capacity = capacity

    def run(self, sequences: list[int]) -> tuple[int, list[int]]:
        hit = next((i for i, block in enumerate(sequences) if block not in self._blocks), len(sequences))
        for block in reversed(sequences[:hit]):
            self._blocks.move_to_end(block)
        excess = max(0, len(self._blocks) + len(sequences) - hit - self._capacity)
        evicted = [self._blocks.popitem(last=False)[0] for _ in range(excess)]
        for block in reversed(sequences):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        return hit, evicted


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Chats that grow turn by turn and branch: ids name prefixes, as in the real trace."""
    rng = random.Random(0)
    paths: list[list[int]] = [[0]]
    next_id = 1
    lines = []
    for _ in range(300):
        base = rng.choice(paths[-20:])
        path = base[: rng.randint(1, len(base))]
        for _ in range(rng.randint(1, 4)):
            path = [*path, next_id]
            next_id += 1
        paths.append(path)
        lines.append(json.dumps({"hash_ids": path}))
    file = tmp_path / "trace.jsonl.gz"
    file.write_bytes(gzip.compress("\n".join(lines).encode()))
    return file


@pytest.mark.parametrize("capacity", [20 * BLOCKS_PER_ID, 20 * BLOCKS_PER_ID + 7])
def test_workers_evict_and_store_what_a_cache_of_single_blocks_does(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capacity: int
) -> None:
    monkeypatch.setattr(stream_writer, "CACHE_BLOCKS", capacity)
    write_stream(tmp_path, trace, 300, NUM_WORKERS)
    requests = [json.loads(line)["hash_ids"] for line in gzip.decompress(trace.read_bytes()).splitlines()]
    stream = Stream(tmp_path, NUM_WORKERS)
    caches = [BlockCache(capacity) for _ in range(NUM_WORKERS)]
    evictions = partial_hits = 0
    for number, ids in enumerate(requests):
        step = stream.step(number)
        sequences = sequences_of(np.array(ids, dtype=np.uint64)).tolist()
        hit, evicted = caches[number % NUM_WORKERS].run(sequences)
        assert step.worker == number % NUM_WORKERS
        assert step.query.tolist() == blocks_of(np.array(ids, dtype=np.uint64)).tolist()
        assert step.removed.tolist() == evicted
        stored = step.stored.sequences.tolist() if step.stored else []
        assert stored == sequences[hit:]
        if step.stored is not None:
            assert step.stored.parent == (sequences[hit - 1] if hit else None)
        evictions += len(evicted)
        partial_hits += hit % BLOCKS_PER_ID > 0
    assert evictions, "a stream without evictions proves nothing"
    assert (partial_hits > 0) == (capacity % BLOCKS_PER_ID > 0)
