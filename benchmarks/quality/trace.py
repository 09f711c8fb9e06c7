"""Requests of a trace in the format of Mooncake's, with the hashes of their blocks."""

import gzip
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from runtime.blocks.block_hash import sequence_hashes
from runtime.blocks.xxh3 import block_hashes

TRACE_BLOCK = 512  # tokens that one hash id of the trace stands for
BATCH_S = 3.0  # the trace's timestamps are rounded to it
IDS_AT_A_TIME = 4096


class TraceLine(Struct, frozen=True):
    timestamp: int  # ms
    input_length: int
    output_length: int
    hash_ids: list[int]  # one per 512 tokens; the last one stands for the rest


@dataclass(frozen=True, slots=True)
class TraceRequest:
    number: int
    batch_s: float
    prompt_tokens: int
    output_tokens: int
    block_hashes: NDArray[np.uint64]  # of the prompt's full blocks
    sequence_hashes: NDArray[np.uint64]
    exact: bool = False  # `batch_s` is the time of arrival; there is no batch


def load_trace(path: Path, block_size: int, limit: int | None = None) -> list[TraceRequest]:
    """The requests in the order of the file, which is the order of time."""
    with gzip.open(path) as file:
        lines = [
            msgspec.json.decode(line, type=TraceLine) for _, line in zip(range(limit or 10**9), file, strict=False)
        ]
    rows, of_id = _hashes_of_ids({hash_id for line in lines for hash_id in line.hash_ids}, block_size)
    requests = []
    for number, line in enumerate(lines):
        full = line.input_length // block_size
        hashes = np.concatenate([of_id[rows[hash_id]] for hash_id in line.hash_ids])[:full]
        requests.append(
            TraceRequest(
                number,
                line.timestamp / 1e3,
                line.input_length,
                max(1, line.output_length),
                hashes,
                sequence_hashes(hashes),
            )
        )
    return requests


def _hashes_of_ids(ids: set[int], block_size: int) -> tuple[dict[int, int], NDArray[np.uint64]]:
    """(row by hash id, hashes [ids, blocks per id]); hash id h stands for the token ids 512 h to 512 h + 511."""
    ordered = sorted(ids)
    per_id = TRACE_BLOCK // block_size
    hashes = np.empty((len(ordered), per_id), dtype=np.uint64)
    for start in range(0, len(ordered), IDS_AT_A_TIME):
        some = np.array(ordered[start : start + IDS_AT_A_TIME], dtype=np.uint32)
        tokens = (some[:, None] * np.uint32(TRACE_BLOCK) + np.arange(TRACE_BLOCK, dtype=np.uint32)).reshape(-1)
        hashes[start : start + len(some)] = block_hashes(tokens, block_size).reshape(len(some), per_id)
    return {hash_id: row for row, hash_id in enumerate(ordered)}, hashes


def arrivals(requests: list[TraceRequest], speed: float, seed: int) -> Iterator[tuple[float, TraceRequest]]:
    """(seconds, request) in order of time. Where times are rounded, requests of one timestamp are spread over their
    batch. `speed` divides all times."""
    dice = random.Random(seed)
    for batch_s, batch in groupby(requests, key=lambda request: request.batch_s):
        members = list(batch)
        if members[0].exact:
            yield from ((batch_s / speed, request) for request in members)
            continue
        offsets = sorted(dice.uniform(0.0, BATCH_S) for _ in members)
        for offset_s, request in zip(offsets, members, strict=True):
            yield (batch_s + offset_s) / speed, request
