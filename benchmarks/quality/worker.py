"""A mock worker in simulated time: steps last as the mock engine's formula says, the block manager is the engine's own.

So is the scheduler. It makes a step for every token; here, consecutive steps that only decode are one up to the
worker's next event.
"""

import math
import random
from array import array
from collections import deque
from collections.abc import Sequence as Run
from dataclasses import dataclass, field

import numpy as np

from baton_proto.discovery import TimedStep, WorkerLoad
from baton_proto.kv_events import KvEvent
from baton_proto.sampling import SamplingParams
from benchmarks.quality.trace import TraceRequest
from engine.blocks.block_manager import BlockManager
from engine.core.scheduler import Scheduler
from engine.core.timed_steps import work_of
from engine.sequences.batch import Batch
from engine.sequences.sequence import Sequence
from router.workers.load import Charge
from runtime.config.planner import TargetsConfig
from runtime.config.step_times import StepTimes
from runtime.discovery.worker_key import WorkerKey

TARGETS = TargetsConfig()
TOO_SMALL = "the pool is too small for a single request"
MAX_BATCH_TOKENS = 8192
RESTORE_TOKEN_MS = 147_456 / 50e9 * 1e3
"""A token's KV of an 8B model over a link of 50 GB/s."""


class Slots:
    """A lower tier of which only the books are kept: nothing is copied."""

    num_window_slots = 0
    spare = 0
    checksums = None
    block_s = 0.0

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots

    def store(self, blocks: Run[int], slots: Run[int]) -> None:
        pass

    def load(self, slots: Run[int], blocks: Run[int]) -> None:
        pass

    def load_s(self, num_blocks: int) -> float:
        return 0.0

    def close(self) -> None:
        pass


@dataclass(slots=True, eq=False)
class Job:
    """A request on a worker."""

    request: TraceRequest
    arrived_s: float
    sequence: Sequence
    charge: Charge
    decode: WorkerKey = ("", 0)  # the worker that decodes it
    prefill: WorkerKey = ("", 0)  # the worker that runs its prompt, if it is another
    ships: bool = False  # it is a prompt, whose KV leaves for a decode worker
    shipped: bool = False  # its KV comes from a prefill worker
    found_tokens: int = 0  # in that worker's cache
    first_token_s: float = 0.0

    @property
    def left(self) -> int:
        """How many tokens are still to be generated."""
        return self.request.output_tokens - (self.sequence.num_tokens - self.request.prompt_tokens)


@dataclass(slots=True)
class Step:
    """The running step: prompt chunks with one token for each decode beside them, or `count` steps that only decode."""

    began_s: float
    end_s: float
    batch: Batch
    work: TimedStep  # of one step; its time is not filled in
    count: int


@dataclass(slots=True)
class Ended:
    """The outcome of a step."""

    events: list[KvEvent] = field(default_factory=list)
    first_tokens: list[Job] = field(default_factory=list)
    finished: list[Job] = field(default_factory=list)
    shipped: list[Job] = field(default_factory=list)  # their KV is on its way to their decode workers


class SimulatedEngine(StepTimes, frozen=True):
    """The step times of a worker, and how many times as fast it does everything."""

    speed_up: float = 1.0


class SimulatedWorker:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        config: SimulatedEngine,
        num_slots: int = 0,
        *,
        noise: float = 0.0,
        dice: random.Random | None = None,
    ) -> None:
        self.blocks = BlockManager(num_blocks, block_size, Slots(num_slots) if num_slots else None)
        self.scheduler = Scheduler(
            self.blocks, max_batch_tokens=MAX_BATCH_TOKENS, max_running=MAX_BATCH_TOKENS, targets=TARGETS
        )
        self.step: Step | None = None
        self.step_times = self.scheduler.budget.times = config.faster(config.speed_up)
        self._restore_token_ms = RESTORE_TOKEN_MS / config.speed_up
        self._noise, self.dice = noise, dice or random.Random()
        self._jobs: dict[str, Job] = {}  # those that wait or run here, by the id of their sequence
        self._unreserved: deque[Job] = deque()  # there is no room yet for the KV of their prompts
        self._arrived: list[Job] = []  # with the KV of their prompts

    def submit(self, job: Job, now_s: float) -> None:
        """Queues the job. A run of decode steps ends with the single step that is under way."""
        self._jobs[job.sequence.request_id] = job
        if job.shipped:
            self._arrived.append(job)
        else:
            self.scheduler.add(job.sequence)
        self._interrupt(now_s)

    def reserve(self, job: Job, now_s: float) -> None:
        """Asks for blocks for KV that a prefill worker will ship."""
        self._unreserved.append(job)
        self._interrupt(now_s)

    def reserved(self) -> list[Job]:
        """The sequences that have been given blocks by now, in order."""
        jobs = []
        while self._unreserved and self.scheduler.reserve(self._unreserved[0].sequence):
            jobs.append(self._unreserved.popleft())
        if self._unreserved and not jobs and not self.blocks.num_used:
            raise RuntimeError(TOO_SMALL)
        return jobs

    def begin(self, now_s: float) -> float | None:
        """Starts the next step. Returns when the step ends, None when there is nothing to do."""
        assert self.step is None
        landed = self._land()
        num_raised = self.blocks.tiers.num_raised
        batch = self.scheduler.schedule(now_s)
        if self.scheduler.take_dead_ends():
            raise RuntimeError(TOO_SMALL)
        if not batch.num_tokens:
            return None
        self.step = Step(now_s, now_s, batch, work_of(batch), 1)
        if batch.prefill:
            ms = self._step_ms(self.step)
            ms *= self.dice.lognormvariate(0.0, self._noise) if self._noise else 1.0
            ms += (self.blocks.tiers.num_raised - num_raised) * self.blocks.block_size * self._restore_token_ms
        else:
            if not landed:
                self._lengthen(self.step)
            ms = self._step_ms(self.step)
        self.step.end_s = now_s + ms / 1e3
        return self.step.end_s

    def end(self) -> Ended:
        """Ends the running step."""
        step, self.step = self.step, None
        assert step is not None
        ended = Ended()
        for item in step.batch.items:
            sequence, job = item.sequence, self._jobs[item.sequence.request_id]
            sequence.num_computed_tokens = item.end
            if item.sample and job.ships:
                self.blocks.commit(sequence)
                self._leave(job)
                ended.shipped.append(job)
                continue
            if item.sample:
                self._append(job, step, ended)
            self.blocks.commit(sequence)
            if job.left == 0:
                self._leave(job)
                ended.finished.append(job)
        ended.events = self.blocks.cache.take_events()
        return ended

    def prompts(self) -> list[Job]:
        """The sequences that wait or run here without a first token."""
        return [job for job in self._jobs.values() if not job.first_token_s]

    def load(self) -> WorkerLoad:
        queued, pairs = self.scheduler.queued_prefill
        return WorkerLoad(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + len(self._unreserved) + len(self._arrived),
            blocks_used=self.blocks.num_used,
            blocks_total=self.blocks.num_blocks,
            queued_prefill_tokens=queued,
            queued_prefill_pairs=pairs,
            prompts=sum(job.ships for job in self._jobs.values()),
        )

    def _land(self) -> bool:
        """Takes in what has arrived from prefill workers. The next step stands for drawing the first token there."""
        landed = bool(self._arrived)
        for job in self._arrived:
            job.sequence.num_computed_tokens = job.request.prompt_tokens - 1
            self.blocks.commit(job.sequence)
            self.scheduler.admit(job.sequence)
        self._arrived.clear()
        return landed

    def _append(self, job: Job, step: Step, ended: Ended) -> None:
        """Appends the tokens of a step. As in the engine, the KV of the last token is computed with the next one."""
        sequence = job.sequence
        if not job.first_token_s:
            job.first_token_s = step.end_s
            ended.first_tokens.append(job)
        sequence.token_ids.extend([_own_token(job.request)] * step.count)
        if step.count > 1:
            has_room = self.blocks.append(sequence)
            assert has_room
            sequence.num_computed_tokens = sequence.num_tokens - 1

    def _leave(self, job: Job) -> None:
        self.scheduler.finish(job.sequence)
        del self._jobs[job.sequence.request_id]

    # --- the time of steps --------------------------------------------------------------------------------------------

    def _step_ms(self, step: Step) -> float:
        """The time of `step.count` steps in a row, each of which adds a token to every context."""
        times, work, count = self.step_times, step.work, step.count
        ms = times.step_ms(work.prompt_tokens, work.prompt_pairs, work.sequences, work.context_tokens)
        return count * ms + times.decode_token_ms * work.sequences * count * (count - 1) / 2

    def _lengthen(self, step: Step) -> None:
        """Makes a run of a step that only decodes, up to the next end, unless blocks may run out meanwhile."""
        count = min(self._jobs[item.sequence.request_id].left for item in step.batch.decode)
        if len(self.scheduler.running) * ((count + 1) // self.blocks.block_size + 1) <= self.blocks.num_available:
            step.count = count

    def _interrupt(self, now_s: float) -> None:
        """Ends a run of decode steps at the first end of a single step at or after `now_s`."""
        step = self.step
        if step is None or step.batch.prefill:
            return
        low, high = 1, step.count
        while low < high:
            step.count = (low + high) // 2
            if step.began_s + self._step_ms(step) / 1e3 >= now_s:
                high = step.count
            else:
                low = step.count + 1
        step.count = low
        step.end_s = step.began_s + self._step_ms(step) / 1e3


def new_job(request: TraceRequest, block_size: int, now_s: float, charge: Charge, due_ms: float) -> Job:
    """Makes a job. `due_ms`: as in Fleet. The prompt's tokens are never read, because the hashes of its full blocks are
    known. What the prefix cache compares is made of the hashes: equal where they are."""
    sequence = Sequence(
        str(request.number), [_own_token(request)] * request.prompt_tokens, request.prompt_tokens, _SAMPLING
    )
    sequence.block_hashes = request.block_hashes.tolist()
    sequence.sequence_hashes = request.sequence_hashes.tolist()
    tokens = np.repeat(request.block_hashes.astype(np.uint32), block_size)
    sequence.hashed_tokens = array("I", tokens.tobytes())
    sequence.due_s = now_s + (due_ms if due_ms < math.inf else TARGETS.ttft_ms) / 1e3
    return Job(request, now_s, sequence, charge)


def _own_token(request: TraceRequest) -> int:
    """A token that no other request has. Because of it, no two requests share a block of their outputs."""
    return 2**31 + request.number


_SAMPLING = SamplingParams(max_tokens=math.floor(1e9))
