"""What `baton status` shows: the router's view of the workers, its queue, and its totals."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import asdict, replace

from baton_proto.discovery import UNPAIRED, WorkerLoad, WorkerRecord
from baton_proto.generated import inference_pb2 as pb
from baton_proto.pooling import EMBED, GENERATE
from baton_proto.token_counts import TokenCounts, counts_of
from router.counters.metrics import RouterMetrics
from router.index.indexer import Indexer
from router.requests.admission import AdmissionQueue
from router.workers.load import LoadLedger
from router.workers.pool import PooledWorker, WorkerPool

FROM_LOAD = {*pb.WorkerStatus.DESCRIPTOR.fields_by_name} & {*WorkerLoad.__struct_fields__} - {
    "blocks_total",  # of a worker that has not reported, the record has it
    "last_event_id",  # shown is the last one in the tree
}
"""Numbers that are shown as the worker reports them."""


@dataclass(frozen=True, slots=True)
class StatusView:
    router_id: str
    pool: WorkerPool
    ledger: LoadLedger
    events: Indexer
    queue: AdmissionQueue
    metrics: RouterMetrics
    namesake: Callable[[str], WorkerRecord | None]  # of a worker: a live process that announces the same name

    async def status(self) -> pb.StatusResponse:
        """Workers in the order of their ids."""
        workers = [self._worker(worker) for worker in self.pool.workers.values()]
        workers += [_away(*away) for away in self.pool.away()]
        foreign = self.pool.foreign().items()
        workers += [
            pb.WorkerStatus(worker_id=name, role=one.role, state="unknown", note=f"not used: {one.why}")
            for name, one in foreign
            if name not in self.pool.workers
        ]
        workers.sort(key=lambda worker: worker.worker_id)
        queue = pb.QueueStatus(**self.queue.view()._asdict())
        return pb.StatusResponse(
            router_id=self.router_id, workers=workers, queue=queue, totals=self._totals(), routers=[self.router_id]
        )

    def note(self, worker: PooledWorker) -> str:
        """What an operator should know about the worker; empty when all is well."""
        notes = [f"not used: {worker.misfit}" if worker.misfit else ""]
        if self.pool.is_unpaired(worker):
            notes.append(UNPAIRED)
        elif any(one.record.model_hash != worker.record.model_hash for one in self.pool.ready_decode()):
            notes.append("other decode workers have other weights")
        if (other := self.namesake(worker.record.worker_id)) is not None:
            whose = f"the process {other.pid} at {other.rpc_address} has the same name"
            notes.append(f"announced twice: {whose} and is not used; give one service another --namespace")
        if not worker.link.connected:
            notes.append(": ".join(filter(None, ("the router has no connection to it", worker.link.refusal))))
        notes += [self.events.note(worker.key), worker.record.note, self._other_answer(worker.record)]
        return "; ".join(note for note in notes if note)

    def _other_answer(self, record: WorkerRecord) -> str:
        """Names an external server that answers the fixed prompt otherwise; empty when no more servers do."""
        asked = [worker.record for worker in self.pool.workers.values() if worker.record.greedy]
        counts = Counter(one.greedy for one in asked)
        others = [one for one in asked if one.greedy != record.greedy and counts[one.greedy] >= counts[record.greedy]]
        if not record.greedy or not others:
            return ""
        other = min(others, key=lambda one: (-counts[one.greedy], one.worker_id))
        differ = f"answers a fixed prompt otherwise than {other.worker_id}: other weights, or another dtype"
        return f"{differ} (it serves {record.root!r}, {other.worker_id} {other.root!r})"

    def _worker(self, worker: PooledWorker) -> pb.WorkerStatus:
        record, load = worker.record, asdict(self.ledger.reported(worker.key))
        flow = self.metrics.flows.get(worker.key) or TokenCounts()
        return pb.WorkerStatus(
            **{name: load[name] for name in FROM_LOAD},
            **asdict(flow),
            worker_id=record.worker_id,
            role=record.role,
            state=record.state,
            incarnation=record.incarnation,
            engine=record.engine,
            serves=_serves(record),
            address=record.rpc_address,
            blocks_total=load["blocks_total"] or record.num_blocks,
            note=self.note(worker),
            used=worker.usable and not (self.pool.is_unpaired(worker) or self.namesake(record.worker_id)),
            last_event_id=self.events.last_event_id(worker.key),
            blocks_in_tree=self.events.tree.num_blocks_of(worker.key),
            event_batches=self.events.batches_of(worker.key),
        )

    def _totals(self) -> pb.Totals:
        events, metrics = self.events, self.metrics
        tokens = replace(counts_of(metrics.totals), output_tokens=metrics.streamed_tokens)
        return pb.Totals(
            clock_s=time.monotonic(),
            requests=metrics.placements.total(),
            **asdict(tokens),
            event_batches=events.batches,
            events_refused=events.refused_events,
            events_malformed=events.malformed_events,
            event_gaps=events.gaps,
            snapshots=events.snapshots,
            tree_blocks=events.tree.num_blocks,
            tree_runs=events.tree.num_edges,
        )


def _away(name: str, role: str) -> pb.WorkerStatus:
    note = f"its server is away, or does not fit: `baton logs {name}` says why"
    return pb.WorkerStatus(worker_id=name, role=role, engine="external", state="away", note=note)


def _serves(record: WorkerRecord) -> str:
    if record.tasks == (GENERATE,):
        return ""
    return ", ".join(f"{task} ({record.dimension})" if task == EMBED else task for task in record.tasks)
