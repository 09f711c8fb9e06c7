"""What `baton status` shows: the workers as the router sees them, and its queue. Asked by the gRPC Admin service."""

from typing import Protocol

from baton_proto.generated import inference_pb2 as pb
from router.admission import AdmissionQueue
from router.load import LoadLedger
from router.match import WorkerKey
from router.worker_pool import PooledWorker, WorkerPool


class EventView(Protocol):
    """What status needs of the indexer."""

    def last_event_id(self, worker: WorkerKey) -> int:
        """As the tree has applied it; 0: none."""
        ...

    def note(self, worker: WorkerKey) -> str:
        """What an operator should know of the worker's events; empty when all is well."""
        ...


class StatusView:
    def __init__(
        self, router_id: str, pool: WorkerPool, ledger: LoadLedger, events: EventView, queue: AdmissionQueue
    ) -> None:
        self._router_id = router_id
        self._pool = pool
        self._ledger = ledger
        self._events = events
        self._queue = queue

    async def status(self) -> pb.StatusResponse:
        """Workers in the order of their ids."""
        workers = [self._worker(worker) for _, worker in sorted(self._pool.workers.items())]
        return pb.StatusResponse(router_id=self._router_id, workers=workers, queue=self._queue_status())

    def note(self, worker: PooledWorker) -> str:
        """What an operator should know; empty when all is well."""
        notes = [f"not used: {worker.misfit}" if worker.misfit else ""]
        notes.append("" if worker.link.connected else "the router has no connection to it")
        notes.append(self._events.note(worker.key))
        return "; ".join(note for note in notes if note)

    def _worker(self, worker: PooledWorker) -> pb.WorkerStatus:
        record, load = worker.record, self._ledger.reported(worker.key)
        return pb.WorkerStatus(
            worker_id=record.worker_id,
            role=record.role,
            state=record.state,
            incarnation=record.incarnation,
            blocks_used=load.blocks_used,
            blocks_cached=load.blocks_cached,
            blocks_total=load.blocks_total or record.num_blocks,
            running=load.running,
            waiting=load.waiting,
            last_event_id=self._events.last_event_id(worker.key),
            address=record.rpc_address,
            leases=load.leases,
            note=self.note(worker),
        )

    def _queue_status(self) -> pb.QueueStatus:
        queue = self._queue.view()
        return pb.QueueStatus(
            waiting=queue.waiting, running=queue.running, capacity=queue.capacity, oldest_age_s=queue.oldest_age_s
        )
