"""A mock worker in simulated time: the block manager is the engine's own, steps last as the mock engine's formula says.

The engine's scheduler makes a step for every token. Here, consecutive steps that only decode are one step up to the
worker's next event. Otherwise the scheduler's rules hold: prompt chunks run beside the decodes and share the budget;
when blocks run out, the last one in order of arrival gives its own back, waits, and is computed again.
"""

import math
import random
from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence as Run
from dataclasses import dataclass, field

import numpy as np

from baton_proto.discovery import WorkerLoad, prefill_pairs
from baton_proto.kv_events import KvEvent
from baton_proto.sampling import SamplingParams
from benchmarks.quality.trace import TraceRequest
from engine.blocks.block_manager import BlockManager
from engine.core.prefill_budget import ComingBlocks, Due, Turns, follows, share_by_turns, slips_in, turns
from engine.core.scheduler import LOOK_AHEAD
from engine.core.timed_steps import TimedSteps
from engine.sequences.sequence import Sequence
from router.workers.load import Charge
from runtime.config.step_times import StepTimes, token_pairs
from runtime.discovery.worker_key import WorkerKey

MAX_BATCH_TOKENS = 8192
RESTORE_TOKEN_MS = 147_456 / 50e9 * 1e3
"""A token's KV of an 8B model over a link of 50 GB/s."""
SHIP_TOKEN_MS = RESTORE_TOKEN_MS


class Slots:
    """A lower tier of which only the books are kept: nothing is copied."""

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
    shipped: bool = False  # its KV comes from a prefill worker
    found_tokens: int = 0  # in that worker's cache
    first_token_s: float = 0.0
    due_s: float = math.inf  # when its first token is due

    @property
    def left(self) -> int:
        """How many tokens are still to be generated."""
        return self.request.output_tokens - (self.sequence.num_tokens - self.request.prompt_tokens)


@dataclass(slots=True)
class Step:
    """The running step: prompt chunks with one token for each decode beside them, or `count` steps that only decode."""

    began_s: float
    end_s: float
    chunks: list[tuple[Job, int]]  # each job with the tokens of its chunk
    decodes: list[Job]
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
        prefills_only: bool = False,
        noise: float = 0.0,
        dice: random.Random | None = None,
    ) -> None:
        self.blocks = BlockManager(num_blocks, block_size, Slots(num_slots) if num_slots else None)
        self.step: Step | None = None
        self._config = config
        self._prefills_only, self._noise, self.dice = prefills_only, noise, dice or random.Random()
        self._unreserved: deque[Job] = deque()  # there is no room yet for the KV of their prompts
        self._num_coming = 0  # whose KV a prefill worker computes or ships: their blocks are reserved
        self._arrived: list[Job] = []  # with the KV of their prompts
        self._waiting: deque[Job] = deque()
        self._prefilling: list[Job] = []  # in order of arrival
        self._decoding: list[Job] = []
        self._paused: list[Job] = []  # they lack a block for their newest token
        self.num_preemptions = 0
        self._timed = TimedSteps()
        self._context = 0  # tokens of the decoding sequences

    @property
    def step_times(self) -> StepTimes:
        return self._config.faster(self._config.speed_up)

    def submit(self, job: Job, now_s: float) -> None:
        """Queues the job. A run of decode steps ends with the single step that is under way."""
        (self._arrived if job.shipped else self._waiting).append(job)
        self._num_coming -= job.shipped
        if self.step is not None and not self.step.chunks:
            self._shorten(self.step, now_s)

    def reserve(self, job: Job) -> None:
        """Asks for blocks for KV that a prefill worker will ship."""
        self._unreserved.append(job)

    def reserved(self) -> list[Job]:
        """The sequences that have been given blocks by now, in order."""
        jobs = []
        while self._unreserved:
            keep = len(self._decoding) + self._num_coming + 1
            if not self.blocks.allocate(self._unreserved[0].sequence, keep_available=keep):
                if not self.blocks.num_used:
                    raise RuntimeError("the pool is too small for a single request")
                break
            jobs.append(self._unreserved.popleft())
            self._num_coming += 1
        return jobs

    def begin(self, now_s: float) -> float | None:
        """Starts the next step. Returns when the step ends, None when there is nothing to do."""
        assert self.step is None
        self._resume()
        landed = self._land()
        num_raised = self.blocks.tiers.num_raised
        chunks = self._schedule_prefill(now_s)
        restored = (self.blocks.tiers.num_raised - num_raised) * self.blocks.block_size
        decodes = list(self._decoding)
        if chunks:
            ms = self._prefill_ms(chunks) + (self._decodes_ms(1) if decodes else 0.0)
            ms *= self.dice.lognormvariate(0.0, self._noise) if self._noise else 1.0
            ms += restored * RESTORE_TOKEN_MS / self._config.speed_up
            self.step = Step(now_s, now_s + ms / 1e3, chunks, decodes, 1)
            tokens = sum(count for _, count in chunks)
            pairs = sum(token_pairs(job.sequence.num_computed_tokens, count) for job, count in chunks)
            self._timed.note(tokens, pairs, len(decodes), ms)
        elif decodes:
            count = 1 if landed else min(job.left for job in decodes)
            if len(decodes) * ((count + 1) // self.blocks.block_size + 1) > self.blocks.num_available:
                count = 1  # blocks may run out
            self.step = Step(now_s, now_s + self._decodes_ms(count) / 1e3, [], decodes, count)
        elif self._paused and not self._num_coming:
            raise RuntimeError("the pool is too small for a single request")
        return None if self.step is None else self.step.end_s

    def end(self) -> Ended:
        """Ends the running step."""
        step, self.step = self.step, None
        assert step is not None
        ended = Ended()
        for job in step.decodes:
            if not job.first_token_s:
                job.first_token_s = step.end_s
                ended.first_tokens.append(job)
            self._append(job, step.count)
            if job.left == 0:
                self._finish(job, ended)
        for job, num_tokens in step.chunks:
            job.sequence.num_computed_tokens += num_tokens
            self.blocks.commit(job.sequence)
            if not _left(job):
                if self._prefills_only:
                    self._prefilling.remove(job)
                    self.blocks.free(job.sequence)
                    ended.shipped.append(job)
                else:
                    self._end_prompt(job, step.end_s, ended)
        ended.events = self.blocks.cache.take_events()
        return ended

    def prompts(self) -> list[Job]:
        """The sequences that wait or run here without a first token."""
        return [job for job in (*self._prefilling, *self._waiting) if not job.first_token_s]

    def load(self) -> WorkerLoad:
        queued = sum(job.sequence.num_tokens for job in self._waiting)
        queued += sum(map(_left, self._prefilling))
        pairs = sum(prefill_pairs(0, job.sequence.num_tokens) for job in self._waiting)
        pairs += sum(
            prefill_pairs(job.sequence.num_computed_tokens, job.sequence.num_tokens) for job in self._prefilling
        )
        return WorkerLoad(
            running=len(self._prefilling) + len(self._decoding) + len(self._paused),
            waiting=len(self._waiting) + len(self._unreserved) + len(self._arrived),
            blocks_used=self.blocks.num_used,
            blocks_total=self.blocks.num_blocks,
            queued_prefill_tokens=queued,
            queued_prefill_pairs=pairs,
        )

    def _land(self) -> bool:
        """Takes in what has arrived from prefill workers. Its first token comes with the next step."""
        landed = bool(self._arrived)
        for job in self._arrived:
            job.sequence.num_computed_tokens = job.request.prompt_tokens - 1
            self.blocks.commit(job.sequence)
            self._decoding.append(job)
            self._context += job.sequence.num_tokens
        self._arrived.clear()
        return landed

    def _resume(self) -> None:
        """Gives blocks to those that are paused, in order, from the last ones if need be."""
        self._paused.sort(key=_number)
        while self._paused:
            job = self._paused[0]
            if self.blocks.append(job.sequence):
                self._decoding.append(self._paused.pop(0))
                self._context += job.sequence.num_tokens
                continue
            last = max((*self._prefilling, *self._decoding, *self._paused), key=_number)
            if last is job:
                return
            self._preempt(last)

    def _preempt(self, job: Job) -> None:
        if job in self._decoding:
            self._context -= job.sequence.num_tokens
        for jobs in (self._prefilling, self._decoding, self._paused):
            if job in jobs:
                jobs.remove(job)
        self.blocks.free(job.sequence)
        job.sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.insert(bisect_left(self._waiting, _number(job), key=_number), job)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _schedule_prefill(self, now_s: float) -> list[tuple[Job, int]]:
        budget = MAX_BATCH_TOKENS - len(self._decoding)
        first, late = self.order(now_s)
        everyone = list(self._prefilling)
        leaders = [job for job in everyone if job not in late]
        self._start_in_danger(first, budget, leaders)
        passed: Job | None = None
        num_seen = 0
        for job in [job for job in self._waiting if job not in late]:
            if num_seen == LOOK_AHEAD:
                break
            if self._follows(job, leaders):
                continue
            num_seen += 1
            keep = len(self._decoding)
            if not self._has_turn(job, budget, late):
                passed = passed or job
                continue
            if passed is not None:
                keep += self.blocks.blocks_for(passed.sequence.num_tokens)
            if self._start(job, keep):
                leaders.append(job)
            elif passed is None:
                break
        everyone.extend(job for job in leaders if job not in everyone)
        for job in late:
            has_turn = job in self._waiting and sum(map(_left, self._prefilling)) < budget
            if has_turn and not self._follows(job, everyone) and self._start(job, len(self._decoding)):
                everyone.append(job)
        places = {id(job): place for place, job in enumerate(self._prefilling)}
        order = Turns(*([places[id(job)] for job in jobs if id(job) in places] for jobs in (first, late)))
        shares = share_by_turns(budget, list(map(_left, self._prefilling)), order)
        return [(job, share) for job, share in zip(self._prefilling, shares, strict=True) if share]

    def order(self, now_s: float) -> tuple[list[Job], list[Job]]:
        """The prompts in danger, and those that are late."""
        jobs = [job for job in self.prompts() if job.due_s < math.inf]
        step_s = self._timed.attentive_s(MAX_BATCH_TOKENS, 0)
        if not jobs or step_s == math.inf:
            return [], []
        jobs.sort(key=lambda job: job.due_s)
        coming = ComingBlocks()
        dues: list[Due] = []
        for place, job in enumerate(jobs):
            start, end = self._start_of(job, coming, is_near=place < LOOK_AHEAD), job.sequence.num_tokens
            due = Due(self._timed.attentive_s(end - start, prefill_pairs(start, end)), job.due_s - now_s)
            coming.add(job.sequence.sequence_hashes, start // self.blocks.block_size, due)
            dues.append(due)
        first, late = turns(dues, step_s)
        return [jobs[i] for i in first], [jobs[i] for i in late]

    def _start_of(self, job: Job, coming: ComingBlocks, *, is_near: bool) -> int:
        sequence = job.sequence
        if sequence.block_table:
            return sequence.num_computed_tokens
        if is_near or sequence.num_looked_up < 0:
            sequence.num_looked_up = self.blocks.tiers.cached_tokens(sequence)
        else:
            sequence.num_looked_up = self.blocks.tiers.more_at_hand(sequence, sequence.num_looked_up)
        size, at_hand = self.blocks.block_size, sequence.num_looked_up
        end = (sequence.num_tokens - 1) // size  # the last token is always computed
        return max(at_hand, coming.start(sequence.sequence_hashes, at_hand // size, end) * size)

    def _follows(self, job: Job, leaders: list[Job]) -> bool:
        """Whether the job waits until an earlier one has computed what both begin with."""
        cached, size = -1, self.blocks.block_size
        for leader in leaders:
            shared = job.sequence.shared_tokens(leader.sequence, size) if _number(leader) < _number(job) else 0
            if leader.sequence.num_computed_tokens >= shared:
                continue
            cached = self.blocks.tiers.cached_tokens(job.sequence) if cached < 0 else cached
            if follows(job.sequence.num_tokens - cached, shared - cached, _left(leader), MAX_BATCH_TOKENS):
                return True
        return False

    def _start_in_danger(self, first: list[Job], budget: int, leaders: list[Job]) -> None:
        for job in first:
            if budget <= 0:
                return
            if job in self._waiting:
                if self._follows(job, leaders):
                    continue
                passed = self._waiting[0]
                keep = 0 if passed is job else self.blocks.blocks_for(passed.sequence.num_tokens)
                if not self._start(job, len(self._decoding) + keep):
                    continue
                leaders.append(job)
            budget -= _left(job)

    def _start(self, job: Job, keep_available: int) -> bool:
        if not self.blocks.allocate(job.sequence, keep_available=keep_available):
            return False
        self._waiting.remove(job)
        insort(self._prefilling, job, key=_number)
        return True

    def _has_turn(self, job: Job, budget: int, late: list[Job]) -> bool:
        before = self._prefilling[: bisect_left(self._prefilling, _number(job), key=_number)]
        before = [one for one in before if one not in late]
        if sum(map(_left, before)) < budget:
            return True
        left = job.sequence.num_tokens - self.blocks.tiers.cached_tokens(job.sequence)
        return slips_in(left, _left(before[0]))

    def _prefill_ms(self, chunks: list[tuple[Job, int]]) -> float:
        config = self._config
        tokens = sum(count for _, count in chunks)
        pairs = sum(token_pairs(job.sequence.num_computed_tokens, count) for job, count in chunks)
        return config.prefill_ms(tokens, pairs) / config.speed_up

    def _decodes_ms(self, count: int) -> float:
        """The time of `count` steps in a row, each of which adds a token to every context."""
        batch = len(self._decoding)
        added = batch * count * (count - 1) / 2
        ms = count * self._config.decode_ms(batch, self._context) + self._config.decode_token_ms * added
        return ms / self._config.speed_up

    def _shorten(self, step: Step, now_s: float) -> None:
        """Ends a run of decode steps at the first end of a single step at or after `now_s`."""
        low, high = 1, step.count
        while low < high:
            middle = (low + high) // 2
            if step.began_s + self._decodes_ms(middle) / 1e3 >= now_s:
                high = middle
            else:
                low = middle + 1
        step.count = low
        step.end_s = step.began_s + self._decodes_ms(low) / 1e3

    # --- what becomes of a job ----------------------------------------------------------------------------------------

    def _end_prompt(self, job: Job, now_s: float, ended: Ended) -> None:
        self._prefilling.remove(job)
        if not job.first_token_s:
            job.first_token_s = now_s
            ended.first_tokens.append(job)
        self._decoding.append(job)
        self._context += job.sequence.num_tokens
        job.sequence.token_ids.append(_own_token(job.request))
        self._context += 1
        if job.left == 0:
            self._finish(job, ended)

    def _append(self, job: Job, count: int) -> None:
        """Appends `count` tokens. As in the engine, the KV of the last token is computed with the next one. The job
        pauses when no block is left for it."""
        sequence = job.sequence
        sequence.token_ids.extend([_own_token(job.request)] * count)
        self._context += count
        if not self.blocks.append(sequence) and job.left:
            self._decoding.remove(job)
            self._context -= sequence.num_tokens
            self._paused.append(job)
        sequence.num_computed_tokens = sequence.num_tokens - 1
        self.blocks.commit(sequence)

    def _finish(self, job: Job, ended: Ended) -> None:
        self._decoding.remove(job)
        self._context -= job.sequence.num_tokens
        self.blocks.free(job.sequence)
        ended.finished.append(job)


def _number(job: Job) -> int:
    """The job's place in the order of arrival."""
    return job.request.number


def _left(job: Job) -> int:
    """How many tokens of the prompt, or of what was preempted, are still to be computed."""
    return job.sequence.num_tokens - job.sequence.num_computed_tokens


def new_job(request: TraceRequest, block_size: int, now_s: float, charge: Charge) -> Job:
    """Makes a job. The prompt's tokens are never read, because the hashes of its full blocks are known. What the prefix
    cache compares is made of the hashes: equal where they are."""
    sequence = Sequence(
        str(request.number), [_own_token(request)] * request.prompt_tokens, request.prompt_tokens, _SAMPLING
    )
    sequence.block_hashes = request.block_hashes.tolist()
    sequence.sequence_hashes = request.sequence_hashes.tolist()
    tokens = np.repeat(request.block_hashes.astype(np.uint32), block_size)
    sequence.hashed_tokens = array("I", tokens.tobytes())
    return Job(request, now_s, sequence, charge)


def _own_token(request: TraceRequest) -> int:
    """A token that no other request has. Because of it, no two requests share a block of their outputs."""
    return 2**31 + request.number


_SAMPLING = SamplingParams(max_tokens=math.floor(1e9))
