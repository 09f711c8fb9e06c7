"""What `baton status` shows: the router's view of the workers, its queue, and its totals."""

import time
from typing import Protocol

from baton_proto.generated import inference_pb2 as pb
from router.counters.metrics import Flow, RouterMetrics
from router.index.radix_tree import RadixTree
from router.requests.admission import AdmissionQueue
from router.workers.load import LoadLedger
from router.workers.pool import PooledWorker, WorkerPool
from runtime.discovery.worker_key import WorkerKey


class EventView(Protocol):
    """What status needs of the indexer."""

    batches: int
    refused_events: int
    malformed_events: int

    @property
    def gaps(self) -> int: ...

    @property
    def snapshots(self) -> int: ...

    @property
    def tree(self) -> RadixTree: ...

    def batches_of(self, worker: WorkerKey) -> int:
        """How many of the worker's batches the tree has applied."""
        ...

    def last_event_id(self, worker: WorkerKey) -> int:
        """The id of the worker's last event in the tree; 0: none."""
        ...

    def note(self, worker: WorkerKey) -> str:
        """What an operator should know about the worker's events; empty when all is well."""
        ...


class StatusView:
    def __init__(
        self,
        router_id: str,
        pool: WorkerPool,
        ledger: LoadLedger,
        events: EventView,
        queue: AdmissionQueue,
        metrics: RouterMetrics,
    ) -> None:
        self.router_id = router_id
        self._pool = pool
        self._ledger = ledger
        self._events = events
        self._queue = queue
        self._metrics = metrics

    async def status(self) -> pb.StatusResponse:
        """Workers in the order of their ids."""
        workers = [self._worker(worker) for _, worker in sorted(self._pool.workers.items())]
        return pb.StatusResponse(
            router_id=self.router_id, workers=workers, queue=self._queue_status(), totals=self._totals()
        )

    def note(self, worker: PooledWorker) -> str:
        """What an operator should know about the worker; empty when all is well."""
        notes = [f"not used: {worker.misfit}" if worker.misfit else ""]
        if self._pool.has_other_weights(worker):
            notes.append(
                "not used: its weights are not those of most decode workers; `baton update-weights` makes them so"
            )
        notes.append("" if worker.link.connected else "the router has no connection to it")
        notes.append(self._events.note(worker.key))
        return "; ".join(note for note in notes if note)

    def _worker(self, worker: PooledWorker) -> pb.WorkerStatus:
        record, load = worker.record, self._ledger.reported(worker.key)
        flow = self._metrics.flows.get(worker.key) or Flow()
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
            blocks_in_tree=self._events.tree.num_blocks_of(worker.key),
            event_batches=self._events.batches_of(worker.key),
            prompt_tokens=flow.prompt_tokens,
            cached_tokens=flow.cached_tokens,
            output_tokens=flow.output_tokens,
            queued_prefill_tokens=load.queued_prefill_tokens,
            step_ms=load.step_ms,
            host_blocks_used=load.host_blocks_used,
            host_blocks_total=load.host_blocks_total,
            disk_blocks_used=load.disk_blocks_used,
            disk_blocks_total=load.disk_blocks_total,
            engine=record.engine,
        )

    def _totals(self) -> pb.Totals:
        events, metrics = self._events, self._metrics
        return pb.Totals(
            clock_s=time.monotonic(),
            requests=metrics.placements.total(),
            prompt_tokens=metrics.totals.started_tokens,
            cached_tokens=metrics.totals.cached_tokens,
            output_tokens=metrics.streamed_tokens,
            event_batches=events.batches,
            events_refused=events.refused_events,
            events_malformed=events.malformed_events,
            event_gaps=events.gaps,
            snapshots=events.snapshots,
            tree_blocks=events.tree.num_blocks,
            tree_runs=events.tree.num_edges,
        )

    def _queue_status(self) -> pb.QueueStatus:
        queue = self._queue.view()
        return pb.QueueStatus(
            waiting=queue.waiting, running=queue.running, capacity=queue.capacity, oldest_age_s=queue.oldest_age_s
        )
