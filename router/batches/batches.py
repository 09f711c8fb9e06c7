"""The batches that this router works on: it takes what is open and what no other router has, oldest first, one of each
tenant at a time."""

import asyncio
from functools import partial
from typing import Final, NamedTuple

import structlog

from router.batches.batch_run import Asking, BatchRun
from router.batches.folder import BatchFolder, Lease, OpenBatch
from runtime.end_task import end_tasks
from runtime.sparing import Sparing
from runtime.within import happens

SCAN_S: Final = 2.0  # within which a batch of a router that has died, or was asked for elsewhere, is taken up
CLOSE_S: Final = 5.0  # for the last lines to be written; the leases end with the process
MAX_AT_ONCE: Final = 16  # of as many tenants

log = structlog.get_logger()
spare = Sparing(lines=5)


class Run(NamedTuple):
    tenant: str
    task: "asyncio.Task[None]"


class Batches:
    def __init__(self, folder: BatchFolder, asking: Asking) -> None:
        self._folder = folder
        self._asking = asking
        self._runs: dict[str, Run] = {}  # by id
        self._leaving = asyncio.Event()
        self._wake = asyncio.Event()
        self._scanning: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._scanning = asyncio.create_task(self._scan())

    def wake(self) -> None:
        """There is a new batch."""
        self._wake.set()

    async def close(self) -> None:
        """Leaves the batches to other routers, or to the next one. What is in flight is asked for again."""
        self._leaving.set()
        await end_tasks(self._scanning)
        if self._runs:
            await asyncio.wait({run.task for run in self._runs.values()}, timeout=CLOSE_S)

    async def _scan(self) -> None:
        while True:
            try:
                await self._take_up()
            except OSError as error:
                spare(log.warning, "batches stand still", reason=str(error))
            await happens(self._wake, SCAN_S)
            self._wake.clear()

    async def _take_up(self) -> None:
        for batch in await asyncio.to_thread(self._folder.open_batches):
            is_due = batch.is_cancelled or batch.tenant not in {run.tenant for run in self._runs.values()}
            if is_due and batch.id not in self._runs and len(self._runs) < MAX_AT_ONCE:
                lease = self._folder.lease(batch.id)
                if lease is not None:
                    task = asyncio.create_task(self._work(batch, lease))
                    self._runs[batch.id] = Run(batch.tenant, task)
                    task.add_done_callback(partial(self._ended, batch.id))

    async def _work(self, batch: OpenBatch, lease: Lease) -> None:
        is_over = False
        try:
            stored = await asyncio.to_thread(batch.folder.stored_batch, batch.id)
            if stored is not None:
                log.info("works on a batch", batch=batch.id, status=stored.batch.status)
                run = BatchRun(batch.folder, stored, self._asking)
                is_over = not stored.batch.is_open or await run.run(self._leaving)
        except Exception as error:
            spare(log.error, "a batch stands still", batch=batch.id, exc_info=error)
        finally:
            lease.end(is_over=is_over)

    def _ended(self, batch_id: str, _: object) -> None:
        del self._runs[batch_id]
        self._wake.set()
