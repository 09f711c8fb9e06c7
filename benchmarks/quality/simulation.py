"""One run of the trace through a router's placement and simulated workers: discrete events, no waiting.

Radix tree, load ledger and `place` are the router's own. Events reach the tree when their step ends.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from baton_proto.kv_events import KvEvent
from benchmarks.quality.trace import TraceRequest
from benchmarks.quality.worker import Job, SimulatedWorker, new_job
from router.index.prefix_hits import PrefixHits
from router.index.radix_tree import RadixTree
from router.placement.candidates import NO_CANDIDATES, Candidates, Request
from router.placement.cost import Rules
from router.placement.placement import weigh
from router.workers.load import Charge, LoadLedger
from runtime.config.serving import MockConfig, PlacementConfig
from runtime.discovery.worker_key import WorkerKey


@dataclass(frozen=True, slots=True)
class Fleet:
    workers: int = 8
    tokens_per_worker: int = 1_000_000
    block_size: int = 64
    engine: MockConfig = field(default_factory=MockConfig)
    host_tier: float = 0  # host memory for KV, as a multiple of the device's


@dataclass(slots=True)
class Outcome:
    """The figures of one run."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def mean_ttft_ms(self) -> float:
        return float(np.mean(self.ttft_s)) * 1e3

    def ttft_ms(self, percentile: float) -> float:
        return float(np.percentile(self.ttft_s, percentile)) * 1e3


class Router:
    """Chooses a worker by KV cost; with `config` None, workers take turns."""

    def __init__(self, keys: list[WorkerKey], fleet: Fleet, config: PlacementConfig | None, seed: int) -> None:
        self.now_s = 0.0
        self.tree = RadixTree()
        self.ledger = LoadLedger(fleet.block_size, 300.0, clock=lambda: self.now_s)
        self._keys = tuple(keys)
        self._block_size = fleet.block_size
        self._rules = None if config is None else Rules(config)
        self._turns = itertools.cycle(keys)
        self._dice = random.Random(seed)
        self._hits = PrefixHits(clock=lambda: self.now_s)

    def choose(self, request: TraceRequest) -> tuple[WorkerKey, Charge | None]:
        if self._rules is None:
            return next(self._turns), None
        keys = self._keys
        match = self.tree.find(request.block_hashes)
        candidates = Candidates(keys, match.column(keys), self.ledger.columns(keys), self.ledger.stored(keys))
        hits = self._hits.recent(match.last_block)
        facts = Request(request.prompt_tokens, self._block_size)
        placement = weigh(facts, candidates, NO_CANDIDATES, self._rules, self._dice, prefix_hits=hits).placement()
        assert placement is not None
        self._hits.count(match.last_block)
        uncached = request.prompt_tokens - placement.cached_blocks * self._block_size
        charge = self.ledger.charge(str(request.number), placement.decode, None, request.prompt_tokens, uncached)
        return placement.decode, charge

    def learn(self, key: WorkerKey, events: Iterable[KvEvent]) -> None:
        for event in events:
            self.tree.apply(key, event)


def simulate(
    coming: Iterable[tuple[float, TraceRequest]],
    fleet: Fleet,
    config: PlacementConfig | None,
    seed: int,
    progress: Callable[[], None] = lambda: None,
) -> Outcome:
    """`progress` is called for each request that has arrived."""
    keys: list[WorkerKey] = [(f"decode-{number}", 1) for number in range(fleet.workers)]
    num_blocks = fleet.tokens_per_worker // fleet.block_size
    num_slots = int(fleet.host_tier * num_blocks)
    workers = {key: SimulatedWorker(num_blocks, fleet.block_size, fleet.engine, num_slots) for key in keys}
    router, outcome = Router(keys, fleet, config, seed), Outcome()
    ends: list[
        tuple[float, int, WorkerKey]
    ] = []  # the ends of steps; an entry whose step was shortened later is skipped
    serial = itertools.count()

    def push(key: WorkerKey, end_s: float | None) -> None:
        if end_s is not None:
            heapq.heappush(ends, (end_s, next(serial), key))

    def end_steps(until_s: float) -> None:
        while ends and ends[0][0] <= until_s:
            end_s, _, key = heapq.heappop(ends)
            worker = workers[key]
            if worker.step is None or worker.step.end_s != end_s:
                continue
            router.now_s = end_s
            _end_step(router, key, worker, outcome)
            push(key, worker.begin(end_s))

    for now_s, request in coming:
        end_steps(now_s)
        router.now_s = now_s
        key, charge = router.choose(request)
        worker = workers[key]
        worker.submit(new_job(request, fleet.block_size, now_s, charge), now_s)
        push(key, worker.begin(now_s) if worker.step is None else worker.step.end_s)
        progress()
    end_steps(float("inf"))
    return outcome


def _end_step(router: Router, key: WorkerKey, worker: SimulatedWorker, outcome: Outcome) -> None:
    ended = worker.end()
    router.learn(key, ended.events)
    for job in ended.first_tokens:
        _note(job, outcome)
        if job.charge is not None:
            job.charge.prefill_done()
            job.charge.grow(job.sequence.num_tokens)
    for job in ended.finished:
        if job.charge is not None:
            job.charge.release()
    router.ledger.report(key, worker.load())


def _note(job: Job, outcome: Outcome) -> None:
    outcome.prompt_tokens += job.request.prompt_tokens
    outcome.cached_tokens += job.sequence.num_cached_tokens
    outcome.ttft_s.append(job.first_token_s - job.arrived_s)
