"""The inputs of both halves: a prompt of random tokens, and the block stream of a real conversation trace.

The driver writes both into a folder (stream_writer.py makes the stream), and the halves read them there. This module
needs only numpy, because it also runs in the peer's environment.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK_SIZE = 16
BLOCKS_PER_ID = 32
MAX_TOKENS = 131072
VOCABULARY = 150_000
CHAIN_EVENT_BLOCKS = 1024

Hashes = NDArray[np.uint64]


class Run(NamedTuple):
    """Consecutive blocks that a worker stores. Hashes are [num_blocks]."""

    parent: int | None  # sequence hash
    blocks: Hashes
    sequences: Hashes


class Step(NamedTuple):
    """What one request of the stream queries, and the events that its worker then publishes, in this order."""

    worker: int
    query: Hashes  # block hashes of the prompt
    removed: Hashes  # sequence hashes, deepest first; may be empty
    stored: Run | None


class Stream:
    """The steps of a trace for a number of workers."""

    def __init__(self, folder: Path, num_workers: int) -> None:
        with np.load(folder / f"stream-{num_workers}.npz") as data:
            self._ids, self._id_ends = data["ids"], data["id_ends"]
            self._hits, self._removed, self._removed_ends = data["hits"], data["removed"], data["removed_ends"]
        self._num_workers = num_workers

    def __len__(self) -> int:
        return len(self._hits)

    def step(self, request: int) -> Step:
        ids = _part(self._ids, self._id_ends, request)
        hit = int(self._hits[request])
        blocks = blocks_of(ids)
        sequences = sequences_of(ids)
        parent = int(sequences[hit - 1]) if hit else None
        stored = Run(parent, blocks[hit:], sequences[hit:]) if hit < len(blocks) else None
        removed = _mixed(_part(self._removed, self._removed_ends, request), _SEQUENCE_SALT)
        return Step(request % self._num_workers, blocks, removed, stored)


def write_tokens(folder: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, MAX_TOKENS, dtype=np.uint32)
    np.save(folder / "tokens.npy", tokens)


def read_tokens(folder: Path, num_tokens: int) -> NDArray[np.uint32]:
    tokens: NDArray[np.uint32] = np.load(folder / "tokens.npy")[:num_tokens]
    return tokens


def stream_runs(folder: Path) -> Iterator[Run]:
    for before, *new in json.loads((folder / "runs.json").read_text()):
        ids = np.array(new, dtype=np.uint64)
        parent = int(sequences_of(np.array([before], dtype=np.uint64))[-1]) if before >= 0 else None
        yield Run(parent, blocks_of(ids), sequences_of(ids))


def chain_runs(num_blocks: int) -> Iterator[Run]:
    """One chain of blocks, cut into runs as long as a prefill chunk."""
    parent: int | None = None
    for start in range(0, num_blocks, CHAIN_EVENT_BLOCKS):
        numbers = np.arange(start, min(start + CHAIN_EVENT_BLOCKS, num_blocks), dtype=np.uint64)
        sequences = _mixed(numbers, _SEQUENCE_SALT)
        yield Run(parent, _mixed(numbers, _BLOCK_SALT), sequences)
        parent = int(sequences[-1])


def blocks_of(ids: Hashes) -> Hashes:
    """Block hashes [32 * n] of hash ids [n]."""
    return _mixed(_numbers(ids), _BLOCK_SALT)


def sequences_of(ids: Hashes) -> Hashes:
    """Sequence hashes [32 * n] of hash ids [n], because an id of the trace stands for a whole prefix."""
    return _mixed(_numbers(ids), _SEQUENCE_SALT)


_BLOCK_SALT = np.uint64(0x5851F42D4C957F2D)
_SEQUENCE_SALT = np.uint64(0x14057B7EF767814F)


def _numbers(ids: Hashes) -> Hashes:
    offsets = np.arange(BLOCKS_PER_ID, dtype=np.uint64)
    numbers: Hashes = np.add.outer(ids * np.uint64(BLOCKS_PER_ID), offsets).ravel()
    return numbers


def _mixed(numbers: Hashes, salt: np.uint64) -> Hashes:
    """Block numbers -> well-spread u64, one to one (the finaliser of SplitMix64)."""
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15) + salt
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _part(values: Hashes, ends: NDArray[np.int64], index: int) -> Hashes:
    return values[ends[index - 1] if index else 0 : ends[index]]
