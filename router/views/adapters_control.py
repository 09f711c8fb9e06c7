"""Loads and unloads adapters of a model, for an operator: at all workers that can have adapters, or at one."""

import asyncio
import re
from collections.abc import Sequence

from msgspec import Struct

from router.workers.pool import WorkerPool
from runtime.calls.worker import WorkerClient
from runtime.config.model_entry import NAME_IS, NAME_PATTERN
from runtime.discovery.wanted_adapters import UNLOADED, keep_adapter
from runtime.errors import BatonError, InvalidRequestError, UnknownModelError, shown
from runtime.nats.client import NatsClient


class Row(Struct, omit_defaults=True):
    worker_id: str
    adapters: Sequence[str] = ()  # that it has now
    problem: str = ""


class AdaptersControl:
    def __init__(self, pool: WorkerPool, nats: NatsClient) -> None:
        """`nats`: for the model's namespace."""
        self._pool = pool
        self._nats = nats

    async def load(self, name: str, folder: str, worker_id: str = "") -> Sequence[Row]:
        """A row for each worker that was asked. Raises InvalidRequestError and UnavailableError."""
        if not re.fullmatch(NAME_PATTERN, name) or name == self._pool.model:
            problem = f"is {shown(name)}, which is the model's, or not {NAME_IS}"
            raise InvalidRequestError("lora_name", problem)
        if not folder:
            raise InvalidRequestError("lora_path", "is empty: name the adapter's folder")
        return await self._change(name, folder, worker_id)

    async def unload(self, name: str, worker_id: str = "") -> Sequence[Row]:
        """As `load`; UnknownModelError, too. Requests under way end as they began."""
        if name not in self._pool.adapters():
            raise UnknownModelError(name, sorted(self._pool.adapters()))
        return await self._change(name, UNLOADED, worker_id)

    async def _change(self, name: str, folder: str, worker_id: str) -> Sequence[Row]:
        """What holds for all workers is kept for those that start later."""
        names = [worker_id] if worker_id else sorted(self._pool.workers)
        clients = [self._pool.client(one) for one in names]

        async def row(worker: str, client: WorkerClient) -> Row:
            try:
                return Row(worker, (await client.adapt(name, folder)).adapters)
            except BatonError as error:
                return Row(worker, problem=str(error))

        rows = await asyncio.gather(*map(row, names, clients))
        if not worker_id and any(not one.problem for one in rows):
            await keep_adapter(self._nats, name, folder)
        return rows
