"""The workers as rows: all of them for who begins to watch, then those that have changed."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec.structs import asdict

from baton_proto.discovery import WorkerLoad
from baton_proto.token_counts import TokenCounts
from router.views.gauges import shown_state
from router.workers.load import LoadLedger
from router.workers.pool import PooledWorker, WorkerPool

SLICE: Final = 128  # rows without a pause: about 1 ms


class WorkerRow(TokenCounts, kw_only=True):
    """Its TokenCounts: what has gone through the worker, as the routers saw it."""

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
    note: str


AS_REPORTED: Final = {*WorkerRow.__struct_fields__} & {*WorkerLoad.__struct_fields__}


class WorkerRows:
    def __init__(self, pool: WorkerPool, ledger: LoadLedger, note: Callable[[PooledWorker], str]) -> None:
        self.rows: dict[str, WorkerRow] = {}
        self._pool = pool
        self._ledger = ledger
        self._note = note

    async def changes(self, flows: Mapping[str, TokenCounts]) -> tuple[list[WorkerRow], list[str]]:
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

    def _row(self, worker: PooledWorker, flows: Mapping[str, TokenCounts]) -> WorkerRow:
        record, load = worker.record, self._ledger.reported(worker.key)
        told: dict[str, Any] = {name: getattr(load, name) for name in AS_REPORTED}
        told |= asdict(flows.get(record.worker_id) or TokenCounts())
        told |= {"blocks_total": load.blocks_total or record.num_blocks, "step_ms": round(load.step_ms, 2)}
        state, note = shown_state(worker), self._note(worker)
        return WorkerRow(worker_id=record.worker_id, role=record.role, state=state, note=note, **told)
