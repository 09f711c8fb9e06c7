"""Waits until the routers use workers: each has heard of all of them and has connected to them."""

import asyncio
import time
from collections.abc import Iterable

import grpc

from baton.service.children import Children
from baton.service.launcher import ROUTER
from baton_proto.discovery import UNPAIRED
from baton_proto.generated.inference_pb2 import WorkerStatus
from runtime.calls.router import Client
from runtime.config.external import server_of
from runtime.processes.process import ProcessFailedError

SILENT = "does not answer the other routers"
UNUSED = "is not used by the router"
UNKNOWN = f"{UNUSED}: it does not know it"
POLL_S = 0.05


async def until_used(worker_ids: Iterable[str], client: Client, children: Children, timeout_s: float) -> None:
    """A worker that sleeps, or is the first of its generation, is used as far as it can be. Raises ProcessFailedError
    when a worker's process ends, the time is up, or no router answers. A router that ends meanwhile is not waited
    for."""
    deadline_s = time.monotonic() + timeout_s
    workers = list(worker_ids)
    waits = dict.fromkeys(children.routers, SILENT) | dict.fromkeys(workers, UNKNOWN)
    async with client:
        while waits:
            await asyncio.sleep(POLL_S)
            for name, problem in waits.items():
                if time.monotonic() >= deadline_s or (name in workers and children.living(name) is None):
                    raise ProcessFailedError(name, problem, "")
            living = children.routers
            try:
                status = await client.status(timeout_s)
            except grpc.aio.AioRpcError as error:
                if living and error.code() is grpc.StatusCode.UNAVAILABLE:
                    continue  # the one that was asked has ended
                raise ProcessFailedError(ROUTER, f"does not answer: {error.details()}", "") from error
            waits = {name: SILENT for name in living if name not in status.routers}
            waits |= {name: problem for name in workers if (problem := _unused(name, status.workers))}


def _unused(name: str, workers: Iterable[WorkerStatus]) -> str:
    """Why the worker is not used, or a rank of it; empty when it is, and where that is not to be waited for."""
    ranks = [worker for worker in workers if server_of(worker.worker_id) == name]
    unused = [worker.note or worker.state for worker in ranks if not _settled(worker)]
    return f"{UNUSED}: {unused[0]}" if unused else "" if ranks else UNKNOWN


def _settled(worker: WorkerStatus) -> bool:
    return worker.used or worker.state == "sleeping" or UNPAIRED in worker.note
