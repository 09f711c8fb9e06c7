"""The workers that discovery lists, each with the router's link to it.

A worker is used when it is ready, reachable and serves our model with our block size. Workers of several generations
serve beside each other, each request by those of one. Event loop only.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog

from baton_proto.discovery import EVENTS_ROLE, LoadReport, WorkerLoad, WorkerRecord, weights_tag
from baton_proto.worker import PrefillTarget, SnapshotChunk
from router.workers.link import WorkerLink
from router.workers.load import LoadLedger
from router.workers.pace import Pace
from runtime.calls.worker import WorkerClient
from runtime.config.external import server_of
from runtime.discovery.directory import Change, Foreign
from runtime.discovery.worker_key import WorkerKey
from runtime.errors import InvalidRequestError, WorkerLostError
from runtime.security.cluster_key import ClusterKey

SNAPSHOT_TIMEOUT_S = 30.0
SHOWN_NAMES = 3  # of workers, in a sentence

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class PooledWorker:
    record: WorkerRecord  # the latest one; state and model_hash change, the rest belongs to the incarnation
    link: WorkerLink
    misfit: str  # why it is never used; empty when it fits
    key: WorkerKey = field(init=False)
    adapters: Sequence[str] = ()  # that its requests name
    returns: int = 0  # times that it became ready again

    def __post_init__(self) -> None:
        self.key = (self.record.worker_id, self.record.incarnation)

    @property
    def generation(self) -> tuple[str, str]:
        return self.record.model_hash, self.record.kv_form

    @property
    def weights(self) -> int:
        return weights_tag(self.record.model_hash)

    def has_place(self, adapter: str) -> bool:
        """Whether requests for the adapter need not wait until those for another one have ended."""
        places = self.record.adapter_places
        return not places or adapter in self.adapters or len(self.adapters) < places

    @property
    def problem(self) -> str:
        """Why no request can be sent to it; empty when one can, or soon."""
        return self.misfit or ("" if self.link.connected else self.link.refusal)

    @property
    def usable(self) -> bool:
        return self.link.connected and self.record.state == "ready" and not self.misfit


class Generation(NamedTuple):
    weights: int  # see weights_tag
    others: frozenset[WorkerKey]  # the workers of other generations


class _Ready:
    """The usable workers of one role."""

    def __init__(self, workers: list[PooledWorker]) -> None:
        self.workers = workers
        self.keys = tuple(worker.key for worker in workers)
        self.all_take = min((worker.record.max_model_len for worker in workers), default=math.inf)  # tokens

    def that_take(self, num_tokens: int, adapter: str) -> list[PooledWorker]:
        able = [worker for worker in self.workers if worker.record.max_model_len >= num_tokens]
        return [worker for worker in able if adapter in worker.record.adapters] if adapter else able

    def keys_that_take(
        self, num_tokens: int, adapter: str, excluded: frozenset[WorkerKey] = frozenset()
    ) -> tuple[WorkerKey, ...]:
        """Of workers that have the adapter, those with a place for it, unless all that are not excluded lack one."""
        if num_tokens <= self.all_take and not adapter:
            return self.keys
        able = self.that_take(num_tokens, adapter)
        if adapter:
            able = [one for one in able if one.has_place(adapter) and one.key not in excluded] or able
        return tuple(worker.key for worker in able)


class WorkerPool:
    """`changed` is called when a worker may have become usable or unusable; `load_seen` with every load. `expected`:
    external servers, which come back when they are away, with their roles. `foreign`: workers that cannot be asked.
    `until_asked`: see Waking."""

    def __init__(
        self,
        router_id: str,
        model: str,
        block_size: int,
        ledger: LoadLedger,
        key: ClusterKey | None = None,
        *,
        changed: Callable[[], None] = lambda: None,
        load_seen: Callable[[WorkerKey, WorkerLoad], None] = lambda worker, load: None,
        expected: Mapping[str, str] | None = None,
        foreign: Callable[[], Mapping[str, Foreign]] = dict,
        until_asked: bool = False,
    ) -> None:
        self.workers: dict[str, PooledWorker] = {}  # by worker id
        self.foreign = foreign
        self._until_asked = until_asked
        self._expected = expected or {}
        self._longest = {  # tokens of a request that each took when it was there
            name: 0 for name, role in self._expected.items() if role == "decode"
        }
        self._adapters: frozenset[str] = frozenset()  # see adapters
        self._adapters_of: dict[str, tuple[str, ...]] = {}  # of expected decode workers, when they were there last
        self._tasks: tuple[frozenset[str], int] = frozenset(), 0  # see tasks
        self._pace = Pace()
        self._by_role: dict[str, _Ready] = {}  # a cache, see _ready
        self._generations: tuple[Generation, ...] | None = None  # a cache, see generations
        self._router_id = router_id
        self.model = model
        self._block_size = block_size
        self._ledger = ledger
        self._key = key
        self._on_change = changed
        self._load_seen = load_seen
        self._no_decode_since_s: float | None = time.monotonic()
        self._closing: set[asyncio.Task[None]] = set()

    # --- what discovery says ------------------------------------------------------------------------------------------

    def apply(self, change: Change) -> None:
        """Opens a link to a worker that was added, closes the link to one that was removed."""
        record = change.record
        if record.role == EVENTS_ROLE:
            return  # such a worker takes no requests; only the indexer follows it
        known = self.workers.get(record.worker_id)
        if change.kind == "removed":
            if known is not None:
                self._remove(known, "the worker is gone")
        elif known is None:
            self._add(record)
        else:
            known.returns += record.state == "ready" and known.record.state != "ready"
            known.record = record
        if change.kind != "removed" and (server := server_of(record.worker_id)) in self._longest:
            self._adapters_of[server] = record.adapters
        self._changed()

    def load_report(self, report: LoadReport) -> None:
        """A load from NATS; idle workers send nothing else."""
        worker = self.workers.get(report.worker_id)
        if worker is not None and worker.key[1] == report.incarnation:
            self._on_load(worker.key, report.load)

    def give_up(self, error: Exception) -> None:
        """Fails the requests on all links."""
        for worker in self.workers.values():
            worker.link.give_up(error)

    async def close(self) -> None:
        for worker in list(self.workers.values()):
            self._remove(worker, "the router is closing")
        await asyncio.gather(*self._closing)

    # --- what assignment asks -----------------------------------------------------------------------------------------

    def ready_decode(self, num_tokens: int = 0, adapter: str = "") -> list[PooledWorker]:
        """Usable decode workers that take sequences of `num_tokens` and have the adapter."""
        return self._ready("decode").that_take(num_tokens, adapter)

    def away(self) -> list[tuple[str, str]]:
        """Names and roles of expected servers that are not there."""
        here = set(map(server_of, self.workers))
        return [(name, role) for name, role in self._expected.items() if name not in here]

    def longest_away(self) -> int:
        """The longest request that an expected worker takes which is not usable now, in tokens; 0: there is none."""
        here = {server_of(worker.record.worker_id) for worker in self.ready_decode()}
        return max((longest for name, longest in self._longest.items() if name not in here), default=0)

    def tasks(self) -> tuple[frozenset[str], int]:
        """What decode workers do that are there, or were there last, and the dimension of their embeddings."""
        return self._tasks

    def adapters(self) -> frozenset[str]:
        """Those that decode workers have, servers among them that are away and expected back; while no worker is ready,
        those that were there last."""
        return self._adapters

    def decode_keys(
        self, num_tokens: int = 0, adapter: str = "", excluded: frozenset[WorkerKey] = frozenset()
    ) -> tuple[WorkerKey, ...]:
        """The keys of `ready_decode` that a request may go to; for no adapter the same tuple as long as nothing
        changes."""
        return self._ready("decode").keys_that_take(num_tokens, adapter, excluded)

    def prefill_keys(
        self, num_tokens: int = 0, adapter: str = "", excluded: frozenset[WorkerKey] = frozenset()
    ) -> tuple[WorkerKey, ...]:
        return self._ready("prefill").keys_that_take(num_tokens, adapter, excluded)

    def generations(self) -> tuple[Generation, ...]:
        """Those that decode workers are of: while the others of one are left out, all have the same weights, and where
        prompts are shipped, all can exchange KV."""
        if self._generations is None:
            decode, prefill = self._ready("decode").workers, self._ready("prefill").workers
            kinds = {worker.key: worker.generation if prefill else worker.generation[:1] for worker in decode + prefill}
            self._generations = tuple(
                Generation(weights_tag(kind[0]), frozenset(key for key, other in kinds.items() if other != kind))
                for kind in sorted({kinds[worker.key] for worker in decode})
            )
        return self._generations

    def link(self, key: WorkerKey) -> WorkerLink:
        """Raises WorkerLostError."""
        return self._worker(key).link

    def has_place(self, key: WorkerKey, adapter: str) -> bool:
        """See PooledWorker.has_place. Raises WorkerLostError."""
        return self._worker(key).has_place(adapter)

    def has_died(self, key: WorkerKey) -> bool:
        """Whether the worker is gone, or its stream to us has broken."""
        worker = self.workers.get(key[0])
        return worker is None or worker.key != key or worker.link.failed

    def client(self, worker_id: str) -> WorkerClient:
        """The client for an operator's question to the worker. Raises InvalidRequestError."""
        worker = self.workers.get(worker_id)
        if worker is None:
            known = ", ".join(sorted(self.workers)) or "none"
            raise InvalidRequestError("worker_id", f"there is no worker {worker_id!r}; known are {known}")
        return worker.link.client

    def prefill_target(self, key: WorkerKey) -> PrefillTarget:
        """Raises WorkerLostError."""
        record = self._worker(key).record
        return PrefillTarget(record.worker_id, record.incarnation, record.stream_address)

    def snapshot(self, worker_id: str, incarnation: int) -> AsyncIterator[SnapshotChunk]:
        """A worker's block table for the indexer. Raises WorkerLostError, at once or while it is read."""
        return self.link((worker_id, incarnation)).client.snapshot(SNAPSHOT_TIMEOUT_S)

    def is_unpaired(self, worker: PooledWorker) -> bool:
        """Whether a usable worker is left out because no decode worker is of its generation."""
        decode = self._ready("decode").workers
        return worker.usable and bool(decode) and all(worker.generation != one.generation for one in decode)

    def absent(self) -> str:
        """Which decode workers sleep and how to wake them, and why others are not used, as the end of a refusal; empty
        when nothing is known."""
        decode = [worker for worker in self.workers.values() if worker.record.role == "decode"]
        asleep = sorted(worker.key[0] for worker in decode if worker.record.state == "sleeping")
        useless = {worker.key[0]: worker.problem for worker in decode if worker.problem}
        useless |= {name: one.why for name, one in self.foreign().items() if one.role != "prefill"}
        said = ""
        if useless:
            said += f"; not used: {_shown([f'{name} ({why})' for name, why in sorted(useless.items())])}"
        if asleep:
            how = f"`baton wake {asleep[0]}` or POST /wake_up?worker={asleep[0]} wakes one"
            said += f"; asleep: {_shown(asleep)}. {how}"
        return said

    def returns(self, key: WorkerKey) -> int:
        """Times that this worker became ready again; -1: it is gone."""
        worker = self.workers.get(key[0])
        return worker.returns if worker is not None and worker.key == key else -1

    def rests(self) -> bool:
        """Whether no decode worker is usable, and one sleeps, or is about to, or is started when the model is asked
        for."""
        if self._ready("decode").workers:
            return False
        if self._until_asked:
            return True
        states = {worker.record.state for worker in self.workers.values() if worker.record.role == "decode"}
        return not states.isdisjoint(("sleeping", "draining"))

    @property
    def no_decode_since_s(self) -> float | None:
        """When the last usable decode worker went (time.monotonic); None: there is one."""
        return self._no_decode_since_s

    # --- inside -------------------------------------------------------------------------------------------------------

    def _ready(self, role: str) -> "_Ready":
        """Invariant: every change of what is usable ends in `_changed`, which drops this cache."""
        ready = self._by_role.get(role)
        if ready is None:
            usable = [worker for worker in self.workers.values() if worker.record.role == role and worker.usable]
            ready = self._by_role[role] = _Ready(usable)
        return ready

    def _worker(self, key: WorkerKey) -> PooledWorker:
        worker = self.workers.get(key[0])
        if worker is None or worker.key != key:
            raise WorkerLostError(key[0], "is gone")
        return worker

    def _add(self, record: WorkerRecord) -> None:
        key = (record.worker_id, record.incarnation)
        link = WorkerLink(
            record, self._router_id, lambda load: self._on_load(key, load), self._changed, self._key, self._pace
        )
        worker = self.workers[record.worker_id] = PooledWorker(record, link, self._misfit(record))
        if (server := server_of(record.worker_id)) in self._longest:
            self._longest[server] = record.max_model_len
        if worker.misfit:
            log.warning("worker is not used", worker=key[0], reason=worker.misfit)

    def _remove(self, worker: PooledWorker, reason: str) -> None:
        del self.workers[worker.key[0]]
        self._ledger.forget(worker.key)
        task = asyncio.create_task(worker.link.close(reason))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _misfit(self, record: WorkerRecord) -> str:
        if record.model != self.model:
            return f"serves model {record.model!r}, this router {self.model!r}"
        if record.block_size != self._block_size:
            return f"has blocks of {record.block_size} tokens, this router counts in {self._block_size}"
        return ""

    def _on_load(self, key: WorkerKey, load: WorkerLoad) -> None:
        if (worker := self.workers.get(key[0])) is not None and worker.key == key:
            worker.adapters = load.adapters
        self._ledger.report(key, load)
        self._load_seen(key, load)

    def _changed(self) -> None:
        self._by_role.clear()
        self._generations = None
        if ready := self._ready("decode").workers:
            self._no_decode_since_s = None
            tasks = frozenset(task for worker in ready for task in worker.record.tasks)
            away = [self._adapters_of.get(name, ()) for name, _ in self.away()]
            self._adapters = frozenset().union(*away, *(worker.record.adapters for worker in ready))
            self._tasks = tasks, max(worker.record.dimension for worker in ready)
        elif self._no_decode_since_s is None:
            self._no_decode_since_s = time.monotonic()
        self._on_change()


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {len(names) - SHOWN_NAMES} more" * (len(names) > SHOWN_NAMES))


def largest(workers: Iterable[PooledWorker]) -> int | None:
    """The longest sequence that any of the workers takes, in tokens; None: there is no worker."""
    return max((worker.record.max_model_len for worker in workers), default=None)
