"""One run of a trace through a policy and simulated workers: discrete events, no waiting.

Radix tree and load ledger are the router's own. It knows each worker's mean step times, as if it had been up for a
while. Events reach the trees when their step ends. Several routers get the requests at random; each tells the others
what it has charged, and only of its own prompts it knows where they are on their way to.

A prompt goes to its prefill worker when, between two steps, the decode worker has blocks for its KV. What a prefill
worker has computed reaches the decode worker after the time that the router expects for what was not there when its
blocks were reserved; the first token comes with it.
"""

import heapq
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count, cycle

import numpy as np
from msgspec import structs

from baton_proto.kv_events import KvEvent, Stored
from benchmarks.quality.policies import MakePolicy, Question
from benchmarks.quality.trace import TraceRequest
from benchmarks.quality.worker import Job, SimulatedEngine, SimulatedWorker, new_job
from router.index.radix_tree import RadixTree
from router.placement.assignment import candidates
from router.placement.candidates import Request
from router.placement.expected_prefixes import Expectation, ExpectedPrefixes
from router.placement.weights import Weights
from router.workers.charge_sharing import INTERVAL_S
from router.workers.load import Charge, LoadLedger
from runtime.discovery.worker_key import WorkerKey

EXPECTED_S = 30.0  # as in PlacementConfig
TRAVEL_S = 0.001  # of what a router tells the others
SHIP_TOKEN_MS = Weights().ship_token_ms


@dataclass(frozen=True, slots=True)
class Fleet:
    workers: int = 8  # that decode; without prefill workers they run the prompts, too
    tokens_per_worker: int = 1_000_000
    block_size: int = 64
    engine: SimulatedEngine = field(default_factory=SimulatedEngine)
    host_tier: float = 0  # host memory for KV, as a multiple of the device's
    prefill_workers: int = 0
    speeds: tuple[float, ...] = (1.0,)  # of the workers in turn, as multiples of the engine's
    expects: bool = False  # whether the router takes prompts that are on their way for cached
    due_ms: float = math.inf  # when each first token is due; infinite: at the engine's target
    noise: float = 0.0  # standard deviation of the logarithm of a prompt step's time
    routers: int = 1


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
    """What a router knows of the workers, and the policy that it asks."""

    def __init__(
        self,
        prefill: list[WorkerKey],
        decode: list[WorkerKey],
        fleet: Fleet,
        policy: MakePolicy,
        seed: int,
        has_news: Callable[[], None],
    ) -> None:
        """`has_news` is called when others do not know what this router has charged."""
        self.now_s = 0.0
        self.tree = RadixTree()
        self.ledger = LoadLedger(fleet.block_size, 300.0, clock=lambda: self.now_s, has_news=has_news)
        self.ledger.num_routers = fleet.routers
        self._prefill, self._decode = tuple(prefill), tuple(decode)
        self._block_size = fleet.block_size
        self._due_ms = fleet.due_ms
        self._policy = policy(random.Random(seed))
        self._expected = ExpectedPrefixes(EXPECTED_S if fleet.expects else 0.0, clock=lambda: self.now_s)
        self._expectations: dict[int, Expectation] = {}  # by request

    def choose(self, request: TraceRequest) -> tuple[WorkerKey, WorkerKey | None, Charge]:
        """The worker that decodes the request, the one that runs its prompt if it is another, and their charge."""
        question = self.question(request)
        answer = self._policy.choose(question)
        keeps, ships = answer.decode is None, None not in answer
        decodes, place = (question.prefill, answer.prefill) if keeps else (question.decode, answer.decode)
        runs, index = (question.prefill, answer.prefill) if ships else (decodes, place)
        decode, prefill = decodes.workers[place], runs.workers[index] if ships else None
        held = runs.cached[index]
        expectation = self._expected.expect(prefill or decode, request.block_hashes, int(held))
        if expectation is not None:
            self._expectations[request.number] = expectation
        most = (request.prompt_tokens - 1) // self._block_size
        charge = self.ledger.charge(
            str(request.number),
            decode,
            prefill,
            request.prompt_tokens,
            request.prompt_tokens - min(int(held), most) * self._block_size,
            held_blocks=min(int(decodes.cached[place]), most),
        )
        return decode, prefill, charge

    def question(self, request: TraceRequest) -> Question:
        match = self.tree.find(request.block_hashes)
        facts = (match, self._expected.outlook(match, request.block_hashes))
        prefills, decodes = (candidates(self.ledger, keys, *facts) for keys in (self._prefill, self._decode))
        return Question(Request(request.prompt_tokens, self._block_size), prefills, decodes, self._due_ms)

    def first_token(self, request: TraceRequest) -> None:
        if (expectation := self._expectations.pop(request.number, None)) is not None:
            expectation.first_token()

    def learn(self, key: WorkerKey, events: Iterable[KvEvent]) -> None:
        for event in events:
            self.tree.apply(key, event)
            if isinstance(event, Stored):
                self._expected.stored(key, event.block_hashes)


class Run:
    """One run: the workers, and what is to happen to them."""

    def __init__(self, fleet: Fleet, policy: MakePolicy, seed: int) -> None:
        prefill: list[WorkerKey] = [(f"prefill-{number}", 1) for number in range(fleet.prefill_workers)]
        decode: list[WorkerKey] = [(f"decode-{number}", 1) for number in range(fleet.workers)]
        num_blocks = fleet.tokens_per_worker // fleet.block_size
        slots = int(fleet.host_tier * num_blocks)
        self.fleet, self.outcome = fleet, Outcome()
        self.workers: dict[WorkerKey, SimulatedWorker] = {}
        for keys in (prefill, decode):
            for number, (key, speed) in enumerate(zip(keys, cycle(fleet.speeds))):
                engine = structs.replace(fleet.engine, speed_up=fleet.engine.speed_up * speed)
                dice = random.Random(f"{seed} {number} {key}")
                self.workers[key] = SimulatedWorker(
                    num_blocks,
                    fleet.block_size,
                    engine,
                    slots,
                    noise=fleet.noise,
                    dice=dice,
                )
        self.routers = [
            Router(prefill, decode, fleet, policy, seed + 1000 * number, partial(self._has_news, number))
            for number in range(fleet.routers)
        ]
        self._told_s = [-INTERVAL_S] * fleet.routers  # when each has told the others, or will
        self._turns = random.Random(f"{seed} routers")
        self._router_of: dict[int, Router] = {}  # by request
        for router in self.routers:
            for key, worker in self.workers.items():
                router.ledger.report(key, worker.load())
                router.ledger.learn(key, worker.step_times)
        self._coming_kv: dict[int, Job] = {}  # by request: those that prefill workers compute, on their decode workers
        self._serial = count()
        # (time, serial number, worker, None or the job whose KV arrives). Without a job it is the end of a step; such
        # an entry is skipped when the step was shortened. A worker without a name is a router whose charges the others
        # get to know.
        self._coming: list[tuple[float, int, WorkerKey, Job | None]] = []

    def arrive(self, now_s: float, request: TraceRequest) -> None:
        self.until(now_s)
        self._set_clock(now_s)
        router = self._router_of[request.number] = self._turns.choice(self.routers)
        decode, prefill, charge = router.choose(request)
        job = new_job(request, self.fleet.block_size, now_s, charge, self.fleet.due_ms)
        if prefill is None:
            self._submit(decode, job, now_s)
        else:
            job.decode, job.prefill, job.shipped = decode, prefill, True
            worker = self.workers[decode]
            worker.reserve(job, now_s)
            if worker.step is None:
                self._order_prompts(decode, now_s)
            else:
                self._push(worker.step.end_s, decode)

    def until(self, end_s: float) -> None:
        while self._coming and self._coming[0][0] <= end_s:
            now_s, _, key, job = heapq.heappop(self._coming)
            self._set_clock(now_s)
            if not key[0]:
                self._tell_charges(key[1])
                continue
            worker = self.workers[key]
            if job is not None:
                job.first_token_s = now_s
                self._first_token(job)
                self._submit(key, job, now_s)
            elif worker.step is not None and worker.step.end_s == now_s:
                self._end_step(key, worker, now_s)
                self._push(worker.begin(now_s), key)

    def _submit(self, key: WorkerKey, job: Job, now_s: float) -> None:
        worker = self.workers[key]
        worker.submit(job, now_s)
        self._push(worker.begin(now_s) if worker.step is None else worker.step.end_s, key)

    def _order_prompts(self, decode: WorkerKey, now_s: float) -> None:
        """Has the prompts run for whose KV the decode worker has room by now."""
        for job in self.workers[decode].reserved():
            self._coming_kv[job.request.number] = job
            prompt = new_job(job.request, self.fleet.block_size, job.arrived_s, job.charge, self.fleet.due_ms)
            prompt.ships = True
            self._submit(job.prefill, prompt, now_s)

    def _push(self, at_s: float | None, key: WorkerKey, job: Job | None = None) -> None:
        if at_s is not None:
            heapq.heappush(self._coming, (at_s, next(self._serial), key, job))

    def _end_step(self, key: WorkerKey, worker: SimulatedWorker, now_s: float) -> None:
        ended = worker.end()
        for router in self.routers:
            router.learn(key, ended.events)
        for prompt in ended.shipped:
            job = self._coming_kv.pop(prompt.request.number)
            job.found_tokens = prompt.sequence.num_cached_tokens
            missing = job.request.prompt_tokens - job.sequence.num_cached_tokens
            self._push(now_s + missing * SHIP_TOKEN_MS / 1e3, job.decode, job)
        for job in ended.first_tokens:
            self._first_token(job)
            job.charge.grow(job.sequence.num_tokens)
        for job in ended.finished:
            job.charge.release()
        self._order_prompts(key, now_s)
        for router in self.routers:
            router.ledger.report(key, worker.load())

    def _set_clock(self, now_s: float) -> None:
        for router in self.routers:
            router.now_s = now_s

    def _has_news(self, number: int) -> None:
        now_s = self.routers[number].now_s
        if len(self.routers) > 1 and self._told_s[number] <= now_s:
            self._told_s[number] = max(now_s, self._told_s[number] + INTERVAL_S)
            self._push(self._told_s[number] + TRAVEL_S, ("", number))

    def _tell_charges(self, number: int) -> None:
        for worker, totals in self.routers[number].ledger.take_changed().items():
            for router in self.routers:
                if router is not self.routers[number]:
                    router.ledger.set_foreign(str(number), worker, totals)

    def _first_token(self, job: Job) -> None:
        self.note(job)
        self._router_of[job.request.number].first_token(job.request)
        job.charge.prefill_done()

    def note(self, job: Job) -> None:
        outcome = self.outcome
        outcome.prompt_tokens += job.request.prompt_tokens
        outcome.cached_tokens += job.found_tokens if job.shipped else job.sequence.num_cached_tokens
        outcome.ttft_s.append(job.first_token_s - job.arrived_s)


def simulate(
    coming: Iterable[tuple[float, TraceRequest]],
    fleet: Fleet,
    policy: MakePolicy,
    seed: int,
    progress: Callable[[], None] = lambda: None,
) -> Outcome:
    """`progress` is called for each request that has arrived."""
    run = Run(fleet, policy, seed)
    for now_s, request in coming:
        run.arrive(now_s, request)
        progress()
    run.until(float("inf"))
    return run.outcome
