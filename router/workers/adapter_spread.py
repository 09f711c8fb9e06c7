"""Has one more worker of a model load an adapter, when those that have it cannot take more requests for it now."""

import asyncio
import time
from typing import Final

import structlog

from router.workers.pool import WorkerPool
from runtime.end_task import end_tasks
from runtime.errors import BatonError

AGAIN_S: Final = 30.0  # until an adapter is tried again that a worker could not load

log = structlog.get_logger()


class AdapterSpread:
    """Event loop only."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by adapter
        self._failed_s: dict[str, float] = {}

    def crowded(self, adapter: str) -> None:
        """Begins to load it where the fewest others are in use, at a worker that tells its places, as ours with vLLM
        do. A server loads what its operator wants."""
        if adapter in self._tasks or time.monotonic() - self._failed_s.get(adapter, -AGAIN_S) < AGAIN_S:
            return
        workers = self._pool.ready_decode()
        records = [one.record for one in workers if adapter in one.record.adapters]
        told = (dict(zip(one.adapters, one.adapter_folders, strict=False)).get(adapter) for one in records)
        folder = next(filter(None, told), "")
        able = [one for one in workers if one.record.adapter_places and adapter not in one.record.adapters]
        able = [one for one in able if one.has_place(adapter)]
        if folder and able:
            chosen = min(able, key=lambda one: len(one.adapters)).record.worker_id
            task = asyncio.create_task(self._load(adapter, folder, chosen), name=f"adapter {adapter}")
            self._tasks[adapter] = task
            task.add_done_callback(lambda _: self._tasks.pop(adapter, None))

    async def close(self) -> None:
        await end_tasks(*self._tasks.values())

    async def _load(self, adapter: str, folder: str, worker_id: str) -> None:
        try:
            await self._pool.client(worker_id).adapt(adapter, folder)
        except BatonError as error:
            self._failed_s[adapter] = time.monotonic()
            log.warning("an adapter is not loaded by one more worker", adapter=adapter, reason=str(error))
        else:
            log.info("an adapter is loaded by one more worker", adapter=adapter, worker=worker_id)
