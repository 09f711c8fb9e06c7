"""Placement with candidates as rows, as a test writes them."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from router.placement import placement
from router.placement.candidates import Candidates, Request
from router.placement.cost import Rules
from router.placement.placement import Placement, Weighing
from runtime.config.serving import PlacementConfig
from runtime.discovery.worker_key import WorkerKey


class Candidate(NamedTuple):
    worker: WorkerKey
    cached_blocks: int
    queued_prefill_tokens: int
    active_blocks: int
    requests: int = 0
    stored_blocks: float = 0.0
    queued_prefill_pairs: int = 0


def place(
    facts: Request,
    decode: Sequence[Candidate],
    prefill: Sequence[Candidate],
    config: PlacementConfig,
    rng: random.Random,
    **limits: float,
) -> Placement | None:
    return weigh(facts, decode, prefill, config, rng, **limits).placement()


def weigh(
    facts: Request,
    decode: Sequence[Candidate],
    prefill: Sequence[Candidate],
    config: PlacementConfig,
    rng: random.Random,
    **limits: float,
) -> Weighing:
    return placement.weigh(facts, columns(decode), columns(prefill), Rules(config), rng, **limits)


def columns(rows: Sequence[Candidate]) -> Candidates:
    load = [(row.requests, row.queued_prefill_tokens, row.active_blocks, row.queued_prefill_pairs) for row in rows]
    return Candidates(
        tuple(row.worker for row in rows),
        np.array([row.cached_blocks for row in rows], dtype=np.int32),
        np.array(load, dtype=np.int64).reshape(len(rows), 4),
        np.array([row.stored_blocks for row in rows], dtype=np.float64),
    )
