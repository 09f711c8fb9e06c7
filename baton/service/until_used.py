"""Waits until the router uses workers: it has heard of each of them and has connected to it."""

import asyncio
import time
from collections.abc import Iterable

import grpc

from baton.service.children import Children
from baton.service.launches import ROUTER_ID
from baton_proto.generated import inference_pb2 as pb
from runtime.calls.router import Client
from runtime.processes.process import ProcessFailedError

USED = "used"
POLL_S = 0.05


async def until_used(worker_ids: Iterable[str], client: Client, children: Children, timeout_s: float) -> None:
    """Raises ProcessFailedError when a worker's process ends, the time is up, or the router does not answer."""
    deadline_s = time.monotonic() + timeout_s
    states = dict.fromkeys(worker_ids, "it does not know it")
    async with client:
        while any(state != USED for state in states.values()):
            await asyncio.sleep(POLL_S)
            for worker_id, state in states.items():
                if state != USED and (children.living(worker_id) is None or time.monotonic() >= deadline_s):
                    raise ProcessFailedError(worker_id, f"is not used by the router: {state}", "")
            try:
                known = (await client.status(timeout_s)).workers
            except grpc.aio.AioRpcError as error:
                raise ProcessFailedError(ROUTER_ID, f"does not answer: {error.details()}", "") from error
            states |= {worker.worker_id: _state(worker) for worker in known if worker.worker_id in states}


def _state(worker: pb.WorkerStatus) -> str:
    return USED if worker.used else worker.note or worker.state
