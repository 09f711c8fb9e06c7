"""Chunks of a snapshot; that a live worker's snapshot equals its events is shown in test_worker_processes.py."""

import msgspec
import numpy as np
from hypothesis import given, strategies as st

from baton_proto.kv_events import Stored
from baton_proto.worker import SnapshotChunk, encode
from worker.snapshot import Snapshot, chunks


def run_of(parent: int | None, first: int, length: int) -> Stored:
    hashes = np.arange(first, first + length, dtype="<u8")
    return Stored(parent, (hashes + 1_000_000).tobytes(), hashes.tobytes())


def blocks(runs: list[Stored]) -> list[tuple[int | None, int, int]]:
    """(parent, block hash, sequence hash) of every block."""
    result = []
    for run in runs:
        parent = run.parent
        for local, sequence in zip(
            np.frombuffer(run.block_hashes, "<u8").tolist(),
            np.frombuffer(run.sequence_hashes, "<u8").tolist(),
            strict=True,
        ):
            result.append((parent, local, sequence))
            parent = sequence
    return result


@given(st.lists(st.integers(1, 40), max_size=20), st.integers(1, 400))
def test_chunks_hold_the_same_blocks_in_the_same_order(lengths: list[int], chunk_bytes: int) -> None:
    runs = [run_of(None, 1000 * index, length) for index, length in enumerate(lengths)]
    found = list(chunks(Snapshot(7, runs), incarnation=3, chunk_bytes=chunk_bytes))
    assert blocks([run for chunk in found for run in chunk.runs]) == blocks(runs)
    assert [chunk.last for chunk in found] == [False] * (len(found) - 1) + [True]
    assert all((chunk.event_id, chunk.incarnation) == (7, 3) for chunk in found)


def test_a_chunk_of_a_million_blocks_stays_below_a_mebibyte() -> None:
    found = list(chunks(Snapshot(1, [run_of(None, 0, 1_000_000)]), incarnation=1))
    assert max(len(encode(chunk)) for chunk in found) < 1024 * 1024
    assert len(found) > 10


def test_an_empty_cache_is_one_last_chunk() -> None:
    (chunk,) = chunks(Snapshot(0, []), incarnation=1)
    assert chunk == SnapshotChunk(incarnation=1, event_id=0, runs=[], last=True)
    assert msgspec.msgpack.decode(encode(chunk), type=SnapshotChunk) == chunk
