"""Placement with candidates as rows, as a test writes them."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import astuple

from router.placement import placement
from router.placement.candidates import Candidates, Request
from router.placement.placement import Placement, Weighing
from router.placement.weights import Weights
from router.workers.account import NO_LIMIT, NUM_COLUMNS
from runtime.config.step_times import StepTimes
from runtime.discovery.worker_key import WorkerKey

TIMES = StepTimes()


class Candidate(NamedTuple):
    worker: WorkerKey
    cached_blocks: int
    queued_prefill_tokens: int
    active_blocks: int
    requests: int = 0
    queued_prefill_pairs: int = 0
    times: StepTimes = TIMES
    step_began_ms: int = 0  # now it is 1,000,000; 0: just now
    room: tuple[int, int, int, int] = (NO_LIMIT, 0, 0, 0)  # see Account.room


def place(
    facts: Request,
    decode: Sequence[Candidate],
    prefill: Sequence[Candidate],
    config: Weights,
    rng: random.Random,
    **limits: int,
) -> Placement | None:
    return weigh(facts, decode, prefill, config, rng, **limits).placement()


def weigh(
    facts: Request,
    decode: Sequence[Candidate],
    prefill: Sequence[Candidate],
    config: Weights,
    rng: random.Random,
    **limits: int,
) -> Weighing:
    return placement.weigh(facts, columns(decode), columns(prefill), config, rng, **limits)


def columns(rows: Sequence[Candidate]) -> Candidates:
    load = [
        (
            *(row.requests, row.queued_prefill_tokens, row.active_blocks, row.queued_prefill_pairs),
            *((row.step_began_ms or NOW_MS) * 1000, *row.room),
        )
        for row in rows
    ]
    return Candidates(
        tuple(row.worker for row in rows),
        np.array([row.cached_blocks for row in rows], dtype=np.int32),
        np.array(load, dtype=np.int64).reshape(len(rows), NUM_COLUMNS),
        np.array([astuple(row.times) for row in rows]).reshape(len(rows), 6),
        now_us=NOW_MS * 1000,
    )


NOW_MS = 1_000_000
