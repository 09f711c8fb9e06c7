"""The workers' own view of themselves, asked over their gRPC: tests need at once what status shows with delay."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from baton_proto.worker import InspectReport
from runtime.calls.worker import WorkerClient
from runtime.config.external import server_of
from tests.service import Service

POLL_S = 0.01


def worker_client(service: Service, worker_id: str) -> WorkerClient:
    address = service.supervisor.ready[worker_id].addresses["rpc"]
    return WorkerClient(worker_id, address, service.supervisor.keys.cluster)


async def inspect(service: Service, worker_id: str) -> InspectReport:
    async with worker_client(service, worker_id) as client:
        return await client.inspect()


async def inspect_all(service: Service) -> list[InspectReport]:
    """Of every worker whose process lives."""
    ids = service.workers("prefill") + service.workers("decode")
    return list(await asyncio.gather(*(inspect(service, worker_id) for worker_id in ids)))


async def until_running(service: Service, worker_id: str, timeout_s: float = 45) -> None:
    await first_running(service, [worker_id], timeout_s)


async def first_running(
    service: Service,
    worker_ids: Sequence[str],
    timeout_s: float = 45,
    prompt_tokens: int = 0,
    then: Callable[[str], object] = lambda worker_id: None,
) -> str:
    """The first of these workers that is seen with a sequence in its batch, and this many prompt tokens ahead. `then`
    is called at once: the connections of those who look take a while to close."""
    async with asyncio.timeout(timeout_s), AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(worker_client(service, worker_id)) for worker_id in worker_ids]
        while True:
            reports = await asyncio.gather(*(client.inspect() for client in clients))
            for worker_id, report in zip(worker_ids, reports, strict=True):
                if report.load.running and report.load.queued_prefill_tokens >= prompt_tokens:
                    then(worker_id)
                    return worker_id
            await asyncio.sleep(POLL_S)


async def until_gone(service: Service, worker_id: str, timeout_s: float = 45) -> None:
    async with asyncio.timeout(timeout_s):
        while worker_id in service.workers("prefill") + service.workers("decode"):
            await asyncio.sleep(POLL_S)


async def until_idle(service: Service, timeout_s: float = 45) -> float:
    """Waits until no worker holds a block or a lease; returns how long that took. All accounts are in order then."""
    start_s = time.monotonic()
    reports: list[InspectReport] = []
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                reports = await inspect_all(service)
                if not any(_busy(report) for report in reports):
                    break
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(
            f"still busy after {timeout_s} s: {[report for report in reports if _busy(report)]}"
        ) from None
    took_s = time.monotonic() - start_s
    for report in reports:
        assert report.problems == [], report.worker_id
    return took_s


def _busy(report: InspectReport) -> bool:
    load = report.load
    return bool(load.running or load.waiting or load.blocks_used or load.leases)


async def until_used(service: Service, timeout_s: float = 45) -> None:
    """Waits until the router uses every worker whose process lives."""
    alive = {*service.workers("prefill"), *service.workers("decode")}
    async with asyncio.timeout(timeout_s):
        while True:
            workers = (await service.client.status(60)).workers
            if {server_of(worker.worker_id) for worker in workers if worker.used} == alive:
                return
            await asyncio.sleep(POLL_S)


async def until_tree_is_right(service: Service, timeout_s: float = 45) -> None:
    """Waits until the router's tree has applied every event that the workers have published, and has no complaint."""
    async with asyncio.timeout(timeout_s):
        while True:
            published = {report.worker_id: report.load.last_event_id for report in await inspect_all(service)}
            status = await service.client.status(60)
            applied = {worker.worker_id: worker.last_event_id for worker in status.workers}
            if applied == published and not any(worker.note for worker in status.workers):
                return
            await asyncio.sleep(POLL_S)
