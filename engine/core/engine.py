"""The engine: each `step()` schedules a batch, submits it to the runner, and collects the tokens of finished batches.

A runner of depth 1 computes a step while the next one is scheduled. Its tokens are collected one step later, so a
sequence that has ended meanwhile was scheduled once too often; that surplus token is dropped. What can be sampled only
after the token before, such as a token of a grammar, is drawn when that token has been collected. With depth 0 the same
code collects each batch at once. The loop puts the next step off for as long as `spare_s` says.

Owned by one thread (`EngineLoop`), which alone calls anything here. Torch-free: the runner has the tensors.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence as Run
from itertools import islice
from typing import Final

import structlog
from msgspec import Struct, structs

from baton_proto.decoding import MAX_MS
from baton_proto.discovery import Pace, TimedStep, WorkerLoad
from baton_proto.kv_events import KvEvent, Stored
from baton_proto.sampling import TokenLogprobs
from engine.blocks.block_manager import BlockManager
from engine.core.scheduler import Scheduler
from engine.core.timed_steps import TimedSteps, work_of
from engine.drafts.drafter import Drafter
from engine.drafts.speculation import Speculation
from engine.interface import Counts
from engine.sequences.batch import Batch, LayerDone, Runner, SampledToken, ScheduledSequence, StepOnItsWay
from engine.sequences.moves import BEFORE_STEP
from engine.sequences.output import SequenceOutput, StepOutput, finish_reason, news_of
from engine.sequences.sequence import PENDING, Sequence, SequenceStatus
from runtime.config.planner import TargetsConfig
from runtime.config.step_times import USUAL, StepTimes
from runtime.errors import InvalidRequestError, RankLostError

LONG_S: Final = 0.02  # a step that is worth waiting for
LEAD_S: Final = 0.004  # that a step is scheduled and submitted at least before the device is done with the one before
LEADS: Final = 1.5  # times what that took for steps with prompts, of which the longest counts
FADES: Final = 0.95  # of that is left a step later
MARGIN: Final = 0.15  # of a step, by which it may end earlier than expected

log = structlog.get_logger()


class _InFlight(Struct, frozen=True):
    """A submitted batch."""

    batch: Batch
    step: StepOnItsWay | Exception  # the runner refused an exception's batch
    work: TimedStep  # without its time
    started_s: float  # by the engine's clock
    began_s: float  # time.monotonic()


class Engine:
    def __init__(
        self,
        runner: Runner,
        block_manager: BlockManager,
        *,
        max_batch_tokens: int,
        max_running: int,
        eos_token_ids: frozenset[int],
        targets: TargetsConfig | None = None,
        step_times: StepTimes = USUAL,
        clock: Callable[[], float] = time.perf_counter,
        drafter: Drafter | None = None,
    ) -> None:
        """targets: rule how long steps last. step_times: what steps are expected to take until enough were timed.
        clock: returns seconds; it times the steps. drafter: None: nothing is guessed ahead."""
        self.runner = runner
        self.block_manager = block_manager
        self.targets = targets or TargetsConfig()
        self.speculation = Speculation(drafter, eos_token_ids, runner.depth)
        self.scheduler = Scheduler(
            block_manager,
            self.speculation,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            targets=self.targets,
        )
        self.eos_token_ids = eos_token_ids
        self.clock = clock
        self.timed_steps = TimedSteps(step_times)
        block_manager.tiers.compute_s = self.timed_steps.prompt_s
        block_manager.tiers.step_s = self.timed_steps.last_s
        # Called on this thread right before a batch runs; the runner calls its result after each layer of the batch.
        self.on_batch: Callable[[Batch], LayerDone | None] | None = None
        self._in_flight: deque[_InFlight] = deque()
        self._sequences: dict[str, Sequence] = {}  # those that wait or run, by request id
        self._num_steps = 0
        self.num_prompt_tokens = 0  # submitted to the runner so far
        self._preparing_s = 0.0  # that a step with prompts takes until it is submitted
        self._landed_s = 0.0  # when the last step was collected
        self._free_s = 0.0  # the same on time.monotonic(), which a mock runner's clock is not
        self._step_ms = 0.0
        self._landed_ms: list[float] = []  # of the steps that no output has told yet

    # --- sequences come and go ----------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence that is prefilled and decoded here. Raises InvalidRequestError when its request id is in
        use."""
        self._register(sequence)
        sequence.due_s = self.clock() + min(sequence.due_s - time.monotonic(), self.targets.ttft_ms / 1e3)
        self.scheduler.add(sequence)

    def reserve(self, sequence: Sequence) -> bool:
        """Takes blocks for a sequence whose prompt a prefill worker computes; its computed tokens become the prefix
        that is cached here.

        False when the blocks do not fit now: the sequence keeps its turn, and the caller asks again after the next step
        or release. Raises InvalidRequestError when they never fit.
        """
        if not self.scheduler.fits_pool(sequence.num_tokens):
            raise InvalidRequestError("prompt", f"{sequence.num_tokens} tokens do not fit into this worker's KV pool")
        return self.scheduler.reserve(sequence)

    def follows(self, sequence: Sequence, leaders: Run[Sequence]) -> bool:
        """Whether a sequence that is to be reserved had better wait until one of `leaders`, which are reserved, has
        arrived with the prefix that both have in common."""
        return not sequence.block_table and self.scheduler.follows(sequence, leaders)

    def forgo(self, sequence: Sequence) -> None:
        """The caller gives up a sequence that could not be reserved."""
        if sequence.status is SequenceStatus.REMOTE:  # it has blocks, which are being copied
            self.release(sequence)
        else:
            self.block_manager.tiers.forgo(sequence)

    def admit(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> SequenceOutput:
        """The KV of a reserved sequence has arrived with the token sampled after it: the sequence decodes, or ends.

        The result is the only report of that token; step() does not repeat it.
        """
        assert sequence.status is SequenceStatus.REMOTE
        self._register(sequence)
        sequence.num_computed_tokens = sequence.num_tokens
        sequence.due_s = self.clock()  # if it is preempted, its reader waits
        self.block_manager.commit(sequence)
        self.scheduler.admit(sequence)
        sequence.token_ids.append(token_id)
        return self._report(sequence, [SampledToken(token_id, logprobs)])[0]

    def release(self, sequence: Sequence) -> None:
        """Frees the blocks of a reserved sequence that is not admitted. Invariant: nobody writes to them any more."""
        assert sequence.status is SequenceStatus.REMOTE
        self.scheduler.finish(sequence)

    def unpin(self, sequence: Sequence) -> None:
        """Frees the blocks of a pinned sequence that has ended. Invariant: nobody reads them any more."""
        assert sequence.status is SequenceStatus.FINISHED
        sequence.pinned = False
        self.scheduler.release(sequence)

    def abort(self, request_id: str) -> Sequence | None:
        """Ends a waiting or running sequence without an output, and returns it; None when there is none."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence)
        return sequence

    def aim(self, targets: TargetsConfig) -> None:
        self.targets = self.scheduler.budget.targets = targets

    # --- the prefix cache ---------------------------------------------------------------------------------------------

    def clear_cache(self) -> None:
        """Forgets all prefixes that no sequence holds."""
        self.block_manager.clear()

    def forget_cache(self, *, keep: bool) -> list[KvEvent]:
        """See `engine.interface.Engine`."""
        self.block_manager.check_unused()
        if keep:
            self.block_manager.vacate()
        else:
            self.block_manager.clear()
        return self.block_manager.cache.take_events()

    def snapshot(self) -> tuple[list[KvEvent], list[Stored]]:
        """See `engine.interface.Engine`."""
        return self.block_manager.cache.take_events(), self.block_manager.cache.runs()

    def flush(self) -> bool:
        """See `TierTraffic.flush`."""
        return self.block_manager.tiers.flush()

    def restores(self, sequence: Sequence) -> bool:
        """See `TierTraffic.restores`."""
        return self.block_manager.tiers.restores(sequence)

    def on_copied(self, wake: Callable[[], object]) -> None:
        """`wake` is called on some thread when the tiers have done something that a step books."""
        self.block_manager.tiers.on_copied(wake)

    # --- a step -------------------------------------------------------------------------------------------------------

    def step(self) -> StepOutput:
        """A batch that fails ends its sequences with finish "error" instead of raising. Raises RankLostError when no
        step can be computed here any more."""
        began_s = self.clock()
        self.block_manager.expire(began_s)
        restored = self.block_manager.land()
        batch = self._schedule()
        is_under_way = self._submit(batch)
        if batch.prefill:
            self._preparing_s = max(self.clock() - began_s, FADES * self._preparing_s)
        outputs, num_landed, may_wait = self._collect(self.runner.depth if is_under_way else 0)
        if is_under_way and self._in_flight:
            self._draw()
        may_wait &= bool(self._in_flight) and not batch.prefill
        events = self.block_manager.cache.take_events()
        step_ms, self._landed_ms = self._landed_ms, []
        return StepOutput(outputs, events, batch.num_tokens or num_landed, restored, may_wait, step_ms)

    def _schedule(self) -> Batch:
        """Empty while memory is short and a step is on its way, because no sequence of that step can be preempted."""
        if self._in_flight and self.scheduler.is_short_of_memory:
            return Batch([], [])
        budget, timed = self.scheduler.budget, self.timed_steps
        budget.times, budget.is_blind = timed.times, not timed.knows_prompts
        return self.scheduler.schedule(self.clock())

    def _submit(self, batch: Batch) -> bool:
        """Whether a new step is on its way."""
        if batch.num_tokens == 0:
            return False
        for move in batch.moves():
            move.before(BEFORE_STEP)
        for item in batch.drafted:
            item.sequence.guess(item.draft)
        started_s, began_s = self.clock(), time.monotonic()
        step: StepOnItsWay | Exception
        try:
            layer_done = None if self.on_batch is None else self.on_batch(batch)
            step = self.runner.submit(batch, layer_done)
        except RankLostError:
            raise
        except Exception as error:
            step = error
        for item in batch.items:
            sequence = item.sequence
            if sequence.moves:
                sequence.moves = []
            sequence.num_in_flight_tokens += item.num_tokens
            if item.sample:
                sequence.token_ids.append(PENDING)
                sequence.num_pending_tokens += 1
        work = work_of(batch)
        self.num_prompt_tokens += work.prompt_tokens
        self._in_flight.append(_InFlight(batch, step, work, started_s, began_s))
        return not isinstance(step, Exception)

    def spare_s(self) -> float:
        """How many seconds the next step may be put off because the newest one keeps the device busy; at most 0: none.
        A sequence that comes meanwhile need not wait for one step more."""
        if not self._in_flight or not self.timed_steps.knows_prompts:
            return 0.0
        newest = self._in_flight[-1]
        expected_s = self.timed_steps.expected_ms(newest.work) / 1e3
        if not newest.work.prompt_tokens or expected_s < LONG_S:
            return 0.0
        began_s = max(newest.started_s, self._landed_s)
        lead_s = max(LEAD_S, LEADS * self._preparing_s)
        return began_s + expected_s * (1 - MARGIN) - lead_s - self.clock()

    def _draw(self) -> None:
        """Completes the newest step, now that the tokens of the step before are known."""
        newest = self._in_flight[-1]
        assert not isinstance(newest.step, Exception)
        try:
            newest.step.draw()
        except RankLostError:
            raise
        except Exception as error:
            self._in_flight[-1] = structs.replace(newest, step=error)

    def _collect(self, depth: int) -> tuple[list[SequenceOutput], int, bool]:
        """Collects the oldest steps until `depth` or fewer are on their way. Returns news, the number of tokens, and
        whether none is a first or last token."""
        outputs, num_tokens = self._dead_ends(), 0
        has_first = False
        while len(self._in_flight) > depth:
            landed = self._in_flight.popleft()
            outputs += self._postprocess(landed)
            num_tokens += landed.batch.num_tokens
            has_first |= bool(landed.batch.prefill)
        return outputs, num_tokens, not has_first and all(output.finish is None for output in outputs)

    def _postprocess(self, done: _InFlight) -> list[SequenceOutput]:
        landed = self._tokens(done)
        failure = landed if isinstance(landed, Exception) else None
        sampled = iter(()) if isinstance(landed, Exception) else landed
        outputs, size = [], self.block_manager.block_size
        for item in done.batch.items:
            sequence = item.sequence
            tokens = list(islice(sampled, item.num_samples)) if item.sample else []
            if item.draft and tokens:
                tokens = self.speculation.right(item, tokens)
            self._land(item, tokens)
            if sequence.status is SequenceStatus.FINISHED:  # it has ended or was aborted meanwhile
                self.scheduler.release(sequence)
            elif failure is not None:
                outputs.append(self._fail(sequence, f"the step failed: {type(failure).__name__}: {failure}"))
            else:
                # `commit` would find the same: this saves a call for each token.
                if sequence.num_computed_tokens >= (sequence.num_committed_blocks + 1) * size:
                    self.block_manager.commit(sequence)
                if tokens:
                    outputs += self._report(sequence, tokens)
        return outputs

    def _tokens(self, done: _InFlight) -> Iterator[SampledToken] | Exception:
        """Waits for a step. The exception is logged."""
        try:
            if isinstance(done.step, Exception):
                raise done.step
            tokens = done.step.tokens()
            expected = sum(item.num_samples for item in done.batch.items)
            if len(tokens) != expected:
                raise RuntimeError(f"the runner sampled {len(tokens)} tokens where {expected} were due")
            if done.batch.scored:
                for (item, _), scores in zip(done.batch.scored, done.step.scores(), strict=True):
                    item.sequence.add_scores(scores)
        except Exception as error:
            log.exception("step failed", requests=[item.sequence.request_id for item in done.batch.items])
            return error
        now_s = self.clock()
        self._num_steps += 1
        self._step_ms = (now_s - max(done.started_s, self._landed_s)) * 1e3
        self._landed_s = now_s
        self._landed_ms.append(self._step_ms)
        if done.batch.prefill:
            self._note_chunks(done)
        self._free_s = time.monotonic()
        self.timed_steps.add(structs.replace(done.work, step_ms=self._step_ms), now_s)
        return iter(tokens)

    def _note_chunks(self, done: _InFlight) -> None:
        start_s = max(done.began_s, self._free_s)
        end_s = start_s + self._step_ms / 1e3
        for item in done.batch.prefill:
            item.sequence.note_chunk(start_s, end_s, item.num_tokens)

    def _land(self, item: ScheduledSequence, tokens: list[SampledToken]) -> None:
        """Books the step's tokens as computed instead of on their way. tokens: what was sampled; the KV of guesses
        beyond them means nothing, and is written anew before it is read."""
        sequence = item.sequence
        sequence.num_in_flight_tokens -= item.num_tokens
        if sequence.status is not SequenceStatus.FINISHED:
            sequence.num_computed_tokens = item.end - item.num_samples + len(tokens) if item.draft else item.end
            if tokens:
                sequence.learn([token.token_id for token in tokens])
        if sequence.retired_blocks and not sequence.num_in_flight_tokens:
            self.block_manager.settle(sequence)

    # --- how a sequence goes on or ends -------------------------------------------------------------------------------

    def _report(self, sequence: Sequence, tokens: list[SampledToken]) -> list[SequenceOutput]:
        """`tokens`: the last known ones of the sequence, of which the last may end it."""
        if sequence.matcher is not None and sequence.matcher.problem:  # met by the last token
            failed = self._fail(sequence, sequence.matcher.problem, sequence.matcher.is_invalid)
            return [news_of(sequence, tokens[:-1]), failed] if len(tokens) > 1 else [failed]
        finish, stop_token = finish_reason(sequence, tokens[-1].token_id, self.eos_token_ids)
        if finish is not None:
            self._finish(sequence)
        return [news_of(sequence, tokens, finish, stop_token)]

    def _fail(self, sequence: Sequence, problem: str, invalid: bool = False) -> SequenceOutput:
        """Because the KV of a failed step was never committed, freeing the blocks forgets it."""
        self._finish(sequence)
        return SequenceOutput(sequence, [], [], "error", error=problem, invalid=invalid)

    def _dead_ends(self) -> list[SequenceOutput]:
        outputs = []
        for sequence, finish, error in self.scheduler.take_dead_ends():
            if self._sequences.get(sequence.request_id) is sequence:  # else it was aborted
                del self._sequences[sequence.request_id]
                outputs.append(SequenceOutput(sequence, [], [], finish, error=error))
        return outputs

    def _register(self, sequence: Sequence) -> None:
        if sequence.request_id in self._sequences:
            raise InvalidRequestError("request_id", f"{sequence.request_id!r} is already running on this worker")
        self._sequences[sequence.request_id] = sequence

    def _finish(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        del sequence.token_ids[sequence.num_known_tokens :]
        sequence.num_pending_tokens = sequence.num_draft_tokens = 0
        self.scheduler.finish(sequence)

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step has something to try. It may still come out empty: see StepOutput."""
        return bool(self._in_flight) or self.scheduler.has_work or self.block_manager.cache.has_events

    def load(self) -> WorkerLoad:
        """Returns the report without leases and last event id, which the worker fills in."""
        queued_tokens, queued_pairs = self.scheduler.queued_prefill
        manager, cache = self.block_manager, self.block_manager.cache
        return WorkerLoad(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            blocks_used=manager.num_used,
            blocks_cached=manager.num_cached,
            blocks_total=manager.num_blocks,
            host_blocks_used=cache.num_lowered,
            host_blocks_total=cache.num_slots,
            disk_blocks_used=len(cache.copies.of),
            disk_blocks_total=len(cache.copies.all),
            queued_prefill_tokens=queued_tokens,
            queued_prefill_pairs=queued_pairs,
            steps=self._num_steps,
            step_ms=self._step_ms,
        )

    def pace(self) -> Pace:
        """How fast the engine works, with the steps timed since the last call."""
        context_tokens = sum(sequence.num_tokens for sequence in self.scheduler.running)
        host_ms, disk_ms = (min(ms, MAX_MS) for ms in self.block_manager.tiers.restoring_ms())
        return Pace(context_tokens, self.timed_steps.take(), host_ms, disk_ms)

    def counts(self) -> Counts:
        """Any thread."""
        cache, tiers = self.block_manager.cache, self.block_manager.tiers
        return Counts(
            prompt_tokens=self.num_prompt_tokens,
            preemptions=self.scheduler.num_preemptions,
            blocks_kept=len(cache.kept),
            blocks_restored=tiers.num_raised,
            blocks_lowered=tiers.num_moved_down,
            blocks_read=tiers.num_read,
            disk_errors=tiers.num_disk_errors,
            prefix_collisions=cache.table.num_collisions,
            drafted_tokens=self.speculation.num_drafted,
            accepted_tokens=self.speculation.num_accepted,
        )

    def check_integrity(self) -> list[str]:
        """What is wrong with the books, in sentences; empty when all is well. Between steps only."""
        problems = self.block_manager.check_integrity() + self.scheduler.check_integrity()
        known = {*self.scheduler.waiting, *self.scheduler.running}
        problems.extend(f"{s} is queued without being registered" for s in known - set(self._sequences.values()))
        return problems
