"""The router's whole decision without its network: the real assigner, pool, ledger and radix tree; its workers receive
no requests. dynamo_router.py is the counterpart.
"""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from baton_proto.discovery import MAJOR, WorkerRecord
from baton_proto.kv_events import Stored
from benchmarks.routing.inputs import BLOCK_SIZE, MAX_TOKENS, read_tokens
from router.index.match import Match
from router.index.radix_tree import RadixTree
from router.placement.assignment import Assigner
from router.placement.candidates import Request
from router.workers.link import WorkerLink
from router.workers.load import LoadLedger
from router.workers.pool import PooledWorker, WorkerPool
from runtime.blocks.block_hash import sequence_hashes
from runtime.blocks.xxh3 import block_hashes
from runtime.config.serving import RouterConfig

MODEL = "benchmark"
OUTPUT_TOKENS = 128


class BatonRouter:
    def __init__(self, folder: Path, num_workers: int, shipped: bool) -> None:
        """Each worker holds the whole prompt. `shipped`: as many prefill workers come on top of the decode workers."""
        config = RouterConfig()
        self._tokens = read_tokens(folder, MAX_TOKENS)
        self._tree = RadixTree()
        self._ledger = LoadLedger(BLOCK_SIZE)
        pool = WorkerPool("router", MODEL, BLOCK_SIZE, self._ledger)
        hashes = block_hashes(self._tokens, BLOCK_SIZE)
        event = Stored(None, hashes.tobytes(), sequence_hashes(hashes).tobytes())
        for role in ("decode", "prefill") if shipped else ("decode",):
            for number in range(num_workers):
                record = _record(f"{role}-{number}", role)
                # A stand-in for the link: the decision only asks whether its connection is open.
                link = cast(WorkerLink, SimpleNamespace(connected=True, failed=False, worker=(record.worker_id, 1)))
                pool.workers[record.worker_id] = PooledWorker(record, link, misfit="")
                self._tree.apply((record.worker_id, 1), event)
        self._assigner = Assigner(pool, self, self._ledger, config)

    def match(self, hashes: NDArray[np.uint64]) -> Match:
        """Answers the assigner as router/index/indexer.py does."""
        return self._tree.find(hashes)

    def decide(self, num_tokens: int, budget_s: float) -> dict[str, Any]:
        """Times whole decisions: hash, match, select, charge. Freeing the charge is not timed."""
        tokens = self._tokens[:num_tokens]
        clock = time.perf_counter_ns
        samples: list[float] = []
        end_ns = clock() + int(budget_s * 1e9)
        begin_ns = clock()
        cached = 0
        while begin_ns < end_ns or len(samples) < 5:
            request_id = f"request-{begin_ns}"
            begin_ns = clock()
            hashes = block_hashes(tokens, BLOCK_SIZE)
            request = Request(num_tokens, BLOCK_SIZE)
            assignment = self._assigner.assign(request_id, request, num_tokens + OUTPUT_TOKENS, hashes)
            samples.append((clock() - begin_ns) / 1e3)
            assert assignment is not None, "every worker is free"
            cached = assignment.placement.cached_blocks
            assignment.release()
        return {"us": samples, "check": cached}


def _record(worker_id: str, role: str) -> WorkerRecord:
    return WorkerRecord(
        version=MAJOR,
        worker_id=worker_id,
        incarnation=1,
        role=role,
        state="ready",
        rpc_address="127.0.0.1:1",
        stream_address="127.0.0.1:1",
        transfer=None,
        model=MODEL,
        model_hash="",
        block_size=BLOCK_SIZE,
        num_blocks=65536,
        max_model_len=1 << 20,
        pid=0,
    )
