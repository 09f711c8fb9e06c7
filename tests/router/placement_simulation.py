"""Routers and workers in simulated time: the routers' real decision, the workers' real block managers, no I/O between.

A worker runs one prompt after the other, at so many tokens per second, and decodes any number of sequences beside it
at a fixed pace. What crosses the network in a real service arrives late here as well: events, charges, load reports.
"""

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from baton_proto.discovery import MAJOR as RECORD_MAJOR, WorkerLoad, WorkerRecord, prefill_pairs
from baton_proto.kv_events import KvEvent, Stored
from baton_proto.routers.charges import MAJOR, ChargeReport, WorkerCharge
from baton_proto.sampling import SamplingParams
from engine.blocks.block_manager import BlockManager
from engine.sequences.sequence import Sequence
from router.index.match import Match
from router.index.prefix_hits import PrefixHits
from router.index.radix_tree import RadixTree
from router.placement import expected_prefixes
from router.placement.assignment import Assigner, Assignment
from router.placement.candidates import Request
from router.placement.expected_prefixes import ExpectedPrefixes
from router.placement.weights import Weights
from router.workers.charge_sharing import ForeignCharges
from router.workers.link import WorkerLink
from router.workers.load import LoadLedger
from router.workers.pool import PooledWorker, WorkerPool
from runtime.blocks.block_hash import block_hashes
from runtime.config.serving import RouterConfig
from runtime.config.step_times import StepTimes
from runtime.discovery.worker_key import WorkerKey

BLOCK_SIZE = 16
VOCAB = 30_000
RETRY_S = 0.01  # of what found no room
SAMPLING = SamplingParams(max_tokens=1)


@dataclass
class Timing:
    prefill_tokens_per_s: float = 20_000.0
    step_s: float = 0.008  # between two tokens of a sequence
    event_delay_s: float = 0.005
    charge_delay_s: float = 0.005  # interval and travel of the routers' messages to each other
    report_interval_s: float = 1.0


@dataclass
class Job:
    """One request, with what became of it."""

    name: str
    tokens: list[int]
    output: list[int]
    began_s: float = 0.0
    first_token_s: float = 0.0
    cached_tokens: int = 0
    placed_on: tuple[str, str] = ("", "")  # decode worker; prefill worker or empty
    reason: int = 0
    done: Callable[["Job"], None] = lambda job: None


class SimulatedWorker:
    def __init__(self, worker_id: str, role: str, num_blocks: int) -> None:
        self.key: WorkerKey = (worker_id, 1)
        self.role = role
        self.manager = BlockManager(num_blocks, BLOCK_SIZE)
        self.prompts: deque[tuple[Sequence, Callable[[], None]]] = deque()
        self.busy = False
        self.running = self.shipping = 0  # of these, prompts whose KV leaves
        self.busy_since_s = 0.0
        self.request_seconds = 0.0  # requests in flight, integrated
        self.placed = 0
        self.prefilled_tokens = 0
        self._changed_s = 0.0

    def count(self, now: float, change: int) -> None:
        self.request_seconds += self.running * (now - self._changed_s)
        self._changed_s = now
        self.running += change

    def load(self) -> WorkerLoad:
        lengths = [sequence.num_tokens for sequence, _ in self.prompts]
        return WorkerLoad(
            self.running,
            0,
            self.manager.num_used,
            queued_prefill_tokens=sum(lengths),
            queued_prefill_pairs=sum(prefill_pairs(0, length) for length in lengths),
            prompts=self.shipping,
        )


class SimulatedRouter:
    """The whole decision; `match` is what its indexer answers."""

    def __init__(self, simulation: "Simulation", name: str, config: RouterConfig, seed: int) -> None:
        self.name = name
        self.tree = RadixTree()
        timing = simulation.timing
        times = StepTimes(0.0, 1e3 / timing.prefill_tokens_per_s, 0.0, timing.step_s * 1e3, 0.02, 4.2e-5)
        self.ledger = LoadLedger(BLOCK_SIZE, 300.0, simulation.clock, times=times)
        self.others = ForeignCharges(self.ledger, 1e9, simulation.clock)
        self.expected = ExpectedPrefixes(simulation.expected_s, simulation.clock)
        self.pool = WorkerPool(name, "model", BLOCK_SIZE, self.ledger)
        self.assigner = Assigner(self.pool, self, self.ledger, config, random.Random(seed), self.expected, PrefixHits())
        for worker in simulation.workers.values():
            link = cast(WorkerLink, SimpleNamespace(connected=True, worker=worker.key))
            self.pool.workers[worker.key[0]] = PooledWorker(_record(worker), link, misfit="")

    def match(self, hashes: NDArray[np.uint64]) -> Match:
        return self.tree.find(hashes)

    def apply(self, worker: WorkerKey, events: list[KvEvent]) -> None:
        for event in events:
            self.tree.apply(worker, event)
            if isinstance(event, Stored):
                self.expected.stored(worker, event.block_hashes)


@dataclass
class Simulation:
    prefill: int = 0
    decode: int = 64
    num_routers: int = 1
    sharing: bool = True
    expected_s: float = expected_prefixes.TTL_S
    placement: dict[str, float] = field(default_factory=dict)  # changes to the default configuration
    timing: Timing = field(default_factory=Timing)
    num_blocks: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        self.now = 0.0
        self.rng = random.Random(self.seed)
        self.finished: list[Job] = []
        roles = ["prefill"] * self.prefill + ["decode"] * self.decode
        workers = [SimulatedWorker(f"{role}-{i}", role, self.num_blocks) for i, role in enumerate(roles)]
        self.workers = {worker.key[0]: worker for worker in workers}
        default = RouterConfig(max_running_per_worker=4096)
        config = replace(default, placement=Weights(**self.placement))
        seeds = [self.rng.getrandbits(32) for _ in range(self.num_routers)]
        self.routers = [SimulatedRouter(self, f"router-{i}", config, seed) for i, seed in enumerate(seeds)]
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._told: set[str] = set()
        for worker in workers:
            self.at(self.rng.random() * self.timing.report_interval_s, lambda worker=worker: self._report(worker))  # type: ignore[misc]

    def clock(self) -> float:
        return self.now

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (time_s, next(self._numbers), action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay_s, action)

    def run(self, until_s: float) -> None:
        while self._heap and self._heap[0][0] <= until_s:
            self.now, _, action = heapq.heappop(self._heap)
            action()
        self.now = until_s

    # --- a request ----------------------------------------------------------------------------------------------------

    def submit(self, job: Job, router: SimulatedRouter | None = None) -> None:
        """Now, through one of the routers."""
        job.began_s = job.began_s or self.now
        router = router or self.rng.choice(self.routers)
        hashes = block_hashes(np.array(job.tokens, dtype=np.uint32), BLOCK_SIZE)
        request = Request(len(job.tokens), BLOCK_SIZE)
        assignment = router.assigner.assign(job.name, request, len(job.tokens) + len(job.output), hashes)
        if assignment is None:
            self.after(RETRY_S, lambda: self.submit(job, router))
            return
        self._charges_changed(router)
        placement = assignment.placement
        decode = self.workers[placement.decode[0]]
        prefill = self.workers[placement.prefill[0]] if placement.prefill else None
        job.placed_on = (decode.key[0], prefill.key[0] if prefill else "")
        job.reason = placement.reason
        for worker in filter(None, (decode, prefill)):
            worker.placed += 1
            worker.count(self.now, 1)
        sequence = Sequence(job.name, list(job.tokens), len(job.tokens), SAMPLING)
        if prefill is None:
            self._prefill(decode, sequence, lambda: self._decode(router, assignment, job, decode, sequence))
        else:
            prefill.shipping += 1
            self._prefill(prefill, sequence, lambda: self._hand_over(router, assignment, job, prefill, sequence))

    def _prefill(self, worker: SimulatedWorker, sequence: Sequence, then: Callable[[], None]) -> None:
        worker.prompts.append((sequence, then))
        if not worker.busy:
            self._next_prompt(worker)

    def _next_prompt(self, worker: SimulatedWorker) -> None:
        worker.busy = bool(worker.prompts)
        if not worker.busy:
            return
        sequence, then = worker.prompts[0]
        if not worker.manager.allocate(sequence):
            self.after(RETRY_S, lambda: self._next_prompt(worker))
            return
        worker.prompts.popleft()
        tokens = sequence.num_tokens - sequence.num_computed_tokens
        worker.prefilled_tokens += tokens

        def computed() -> None:
            sequence.num_computed_tokens = sequence.num_tokens
            worker.manager.commit(sequence)
            self._publish(worker)
            then()
            self._next_prompt(worker)

        self.after(tokens / self.timing.prefill_tokens_per_s, computed)

    def _hand_over(
        self, router: SimulatedRouter, assignment: Assignment, job: Job, prefill: SimulatedWorker, sequence: Sequence
    ) -> None:
        job.cached_tokens = sequence.num_cached_tokens
        prefill.manager.free(sequence)
        prefill.count(self.now, -1)
        prefill.shipping -= 1
        decode = self.workers[assignment.placement.decode[0]]
        received = Sequence(job.name, list(job.tokens), len(job.tokens), SAMPLING)
        if decode.manager.allocate(received):
            received.num_computed_tokens = received.num_tokens
            decode.manager.commit(received)
            self._publish(decode)
        self._decode(router, assignment, job, decode, received)

    def _decode(
        self, router: SimulatedRouter, assignment: Assignment, job: Job, decode: SimulatedWorker, sequence: Sequence
    ) -> None:
        job.first_token_s = self.now - job.began_s
        job.cached_tokens = max(job.cached_tokens, sequence.num_cached_tokens)
        assignment.prefill_done()
        assignment.charge.grow(len(job.tokens) + len(job.output))
        self._charges_changed(router)

        def ended() -> None:
            sequence.token_ids.extend(job.output)
            if sequence.block_table and decode.manager.append(sequence):
                sequence.num_computed_tokens = sequence.num_tokens - 1
                decode.manager.commit(sequence)
            decode.manager.free(sequence)
            self._publish(decode)
            decode.count(self.now, -1)
            assignment.release()
            self._charges_changed(router)
            self.finished.append(job)
            job.done(job)

        self.after(len(job.output) * self.timing.step_s, ended)

    # --- what the planes carry ----------------------------------------------------------------------------------------

    def _publish(self, worker: SimulatedWorker) -> None:
        events = worker.manager.cache.take_events()

        def arrived() -> None:
            for router in self.routers:
                router.apply(worker.key, events)

        if events:
            self.after(self.timing.event_delay_s, arrived)

    def _charges_changed(self, router: SimulatedRouter) -> None:
        if not self.sharing or router.name in self._told:
            return
        self._told.add(router.name)
        self.after(self.timing.charge_delay_s, lambda: self._tell(router))

    def _tell(self, router: SimulatedRouter) -> None:
        self._told.discard(router.name)
        changed = router.ledger.take_changed()
        workers = [WorkerCharge(*worker, *totals) for worker, totals in changed.items()]
        report = ChargeReport(MAJOR, router.name, 1, workers, full=False)
        for other in self.routers:
            if other is not router:
                other.others.apply(report)

    def _report(self, worker: SimulatedWorker) -> None:
        for router in self.routers:
            router.ledger.report(worker.key, worker.load())
        self.after(self.timing.report_interval_s, lambda: self._report(worker))

    # --- what is measured ---------------------------------------------------------------------------------------------

    def reset_counts(self) -> None:
        """The steady state begins."""
        for worker in self.workers.values():
            worker.count(self.now, 0)
            worker.request_seconds = 0.0
            worker.placed = worker.prefilled_tokens = 0

    def imbalance(self, role: str, what: str) -> float:
        """Largest / mean of a count over the workers of a role."""
        loads = [float(getattr(worker, what)) for worker in self.workers.values() if worker.role == role]
        return max(loads) / (sum(loads) / len(loads) or 1.0)

    def placements(self) -> Counter[int]:
        return Counter(job.reason for job in self.finished)


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def _record(worker: SimulatedWorker) -> WorkerRecord:
    return WorkerRecord(
        RECORD_MAJOR, worker.key[0], 1, worker.role, "ready", "", None, "model", "", BLOCK_SIZE, 8192, 1 << 20, 0
    )
