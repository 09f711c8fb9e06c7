"""The workers as rows: all of them for who begins to watch, then those that have changed."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct

from router.counters.metrics import Flow
from router.views.gauges import shown_state
from router.workers.load import LoadLedger
from router.workers.pool import PooledWorker, WorkerPool

SLICE: Final = 128  # rows without a pause: about 1 ms


class WorkerRow(Struct, frozen=True, array_like=True):
    worker_id: str
    role: str
    state: str  # as discovery says, or "unusable"
    running: int
    waiting: int
    blocks_used: int
    blocks_cached: int
    blocks_total: int
    host_blocks_used: int
    host_blocks_total: int
    disk_blocks_used: int
    disk_blocks_total: int
    leases: int
    queued_prefill_tokens: int
    step_ms: float
    prompt_tokens: int  # this and the next two: counters, as the routers saw them
    cached_tokens: int
    output_tokens: int
    note: str


class WorkerRows:
    def __init__(self, pool: WorkerPool, ledger: LoadLedger, note: Callable[[PooledWorker], str]) -> None:
        self.rows: dict[str, WorkerRow] = {}
        self._pool = pool
        self._ledger = ledger
        self._note = note

    async def changes(self, flows: Mapping[str, Flow]) -> tuple[list[WorkerRow], list[str]]:
        """(rows that are new or differ, ids of workers that are gone) since the last call. `flows`: by worker id. Other
        tasks run between slices of the workers."""
        changed: list[WorkerRow] = []
        for number, worker in enumerate(list(self._pool.workers.values()), 1):
            row = self._row(worker, flows)
            if self.rows.get(row.worker_id) != row:
                self.rows[row.worker_id] = row
                changed.append(row)
            if number % SLICE == 0:
                await asyncio.sleep(0)
        gone = [worker_id for worker_id in self.rows if worker_id not in self._pool.workers]
        for worker_id in gone:
            del self.rows[worker_id]
        return changed, gone

    def _row(self, worker: PooledWorker, flows: Mapping[str, Flow]) -> WorkerRow:
        record, load = worker.record, self._ledger.reported(worker.key)
        flow = flows.get(record.worker_id) or Flow()
        return WorkerRow(
            record.worker_id,
            record.role,
            shown_state(worker),
            load.running,
            load.waiting,
            load.blocks_used,
            load.blocks_cached,
            load.blocks_total or record.num_blocks,
            load.host_blocks_used,
            load.host_blocks_total,
            load.disk_blocks_used,
            load.disk_blocks_total,
            load.leases,
            load.queued_prefill_tokens,
            round(load.step_ms, 2),
            flow.prompt_tokens,
            flow.cached_tokens,
            flow.output_tokens,
            self._note(worker),
        )
