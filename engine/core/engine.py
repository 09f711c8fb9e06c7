"""The engine: one `step()` after the other, each schedules a batch, runs it, and deals with what came out.

A runner of depth 1 computes a step while the next one is scheduled: what comes out of a batch is dealt with one step
later, and a sequence that turns out to have ended was scheduled once too often; that surplus token is dropped. With
depth 0 the same code deals with each batch at once.

Owned by one thread (`EngineLoop`), which alone calls anything here. Torch-free: the runner brings the tensors.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator

import structlog
from msgspec import Struct

from baton_proto.discovery import WorkerLoad
from baton_proto.kv_events import KvEvent
from baton_proto.sampling import TokenLogprobs
from engine.core.batch import Batch, LayerDone, Runner, SampledToken, ScheduledSequence, StepOnItsWay
from engine.core.block_manager import BlockManager
from engine.core.scheduler import Scheduler
from engine.core.sequence import PENDING, Sequence, SequenceStatus
from engine.core.timed_steps import TimedSteps
from runtime.errors import InvalidRequestError, RankLostError

log = structlog.get_logger()


class SequenceOutput(Struct, frozen=True):
    """News of one sequence. After one with `finish` there are no more."""

    sequence: Sequence
    token_ids: list[int]
    logprobs: list[TokenLogprobs]  # as many as token_ids, or none
    finish: str | None = None  # "stop" | "length" | "prefill" | "error"
    stop_token: int | None = None  # the EOS or stop token that ended it; also the last of token_ids
    error: str | None = None  # with finish "error": why


class StepOutput(Struct, frozen=True):
    """`num_tokens` went through the model, or set out to; 0 and no outputs: every sequence waits for someone to free
    blocks."""

    outputs: list[SequenceOutput]
    events: list[KvEvent]
    num_tokens: int = 0


class _InFlight(Struct, frozen=True):
    """A batch that the runner took, or refused: then `step` says why."""

    batch: Batch
    step: StepOnItsWay | Exception
    started_s: float


class Engine:
    def __init__(
        self,
        runner: Runner,
        block_manager: BlockManager,
        *,
        max_batch_tokens: int,
        max_running: int,
        eos_token_ids: frozenset[int],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock`: seconds, by which steps are measured."""
        self.runner = runner
        self.block_manager = block_manager
        self.scheduler = Scheduler(block_manager, max_batch_tokens=max_batch_tokens, max_running=max_running)
        self.eos_token_ids = eos_token_ids
        self.clock = clock
        self.timed_steps = TimedSteps()
        # Right before a batch runs, on this thread; what comes back is called after each of its layers.
        self.on_batch: Callable[[Batch], LayerDone | None] | None = None
        self._in_flight: deque[_InFlight] = deque()
        self._sequences: dict[str, Sequence] = {}  # waiting and running ones by request id
        self._num_steps = 0
        self.num_prompt_tokens = 0  # that went through the model, or set out to
        self._landed_s = 0.0  # when the last step came back
        self._step_ms = 0.0

    # --- sequences come and go ----------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Prefills and decodes the sequence here. Raises InvalidRequestError when its request id is in use."""
        self._register(sequence)
        self.scheduler.add(sequence)

    def reserve(self, sequence: Sequence) -> bool:
        """Blocks for a sequence that a prefill worker computes; its computed tokens become what is cached here.

        False when they do not fit now: ask again after the next step or release, its turn is kept. Raises
        InvalidRequestError when they never will.
        """
        if not self.scheduler.fits_pool(sequence.num_tokens):
            raise InvalidRequestError("prompt", f"{sequence.num_tokens} tokens do not fit into this worker's KV pool")
        return self.scheduler.reserve(sequence)

    def admit(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> SequenceOutput:
        """The KV of a reserved sequence has arrived, with the token sampled after it: runs on, or ends at once.

        The answer is the only report of that token; step() does not repeat it.
        """
        assert sequence.status is SequenceStatus.REMOTE
        self._register(sequence)
        sequence.num_computed_tokens = sequence.num_tokens
        self.block_manager.commit(sequence)
        self.scheduler.admit(sequence)
        sequence.token_ids.append(token_id)
        return self._report(sequence, SampledToken(token_id, logprobs))

    def release(self, sequence: Sequence) -> None:
        """Frees the blocks of a reserved sequence that will not be admitted and that nobody writes to any more."""
        assert sequence.status is SequenceStatus.REMOTE
        self.scheduler.finish(sequence)

    def unpin(self, sequence: Sequence) -> None:
        """Frees the blocks of a pinned sequence that has ended and that nobody reads any more."""
        assert sequence.status is SequenceStatus.FINISHED
        sequence.pinned = False
        self.scheduler.release(sequence)

    def abort(self, request_id: str) -> Sequence | None:
        """Ends a waiting or running sequence without an output and returns it; None when there is no such one."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence)
        return sequence

    def clear_cache(self) -> None:
        """Forgets all prefixes that no sequence holds."""
        self.block_manager.clear()

    # --- a step -------------------------------------------------------------------------------------------------------

    def step(self) -> StepOutput:
        """Raises nothing that a model, a batch or a request can cause: a failing batch ends with finish "error". Raises
        RankLostError when no step can be computed here any more."""
        batch = self._schedule()
        is_under_way = self._submit(batch)
        outputs, num_landed = self._collect(self.runner.depth if is_under_way else 0)
        return self._publish(batch.num_tokens or num_landed, outputs)

    def _schedule(self) -> Batch:
        """Empty while memory is short and a step is on its way: only a sequence that is not in it can be preempted."""
        if self._in_flight and self.scheduler.is_short_of_memory:
            return Batch([], [])
        return self.scheduler.schedule()

    def _submit(self, batch: Batch) -> bool:
        """Whether there is a new step that may take its time."""
        if batch.num_tokens == 0:
            return False
        started_s = self.clock()
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
            sequence.num_in_flight_tokens += item.num_tokens
            if item.sample:
                sequence.token_ids.append(PENDING)
                sequence.num_pending_tokens += 1
        self.num_prompt_tokens += sum(item.num_tokens for item in batch.prefill)
        self._in_flight.append(_InFlight(batch, step, started_s))
        return not isinstance(step, Exception)

    def _collect(self, depth: int) -> tuple[list[SequenceOutput], int]:
        """Deals with the oldest steps until no more than `depth` are on their way. Returns their tokens' number too."""
        outputs, num_tokens = self._dead_ends(), 0
        while len(self._in_flight) > depth:
            landed = self._in_flight.popleft()
            outputs += self._postprocess(landed)
            num_tokens += landed.batch.num_tokens
        return outputs, num_tokens

    def _postprocess(self, done: _InFlight) -> list[SequenceOutput]:
        tokens = self._tokens(done)
        outputs = []
        for item in done.batch.items:
            token = next(tokens) if item.sample and not isinstance(tokens, Exception) else None
            self._land(item, token)
            if item.sequence.status is SequenceStatus.FINISHED:  # it ended or was aborted meanwhile
                self.scheduler.release(item.sequence)
            elif isinstance(tokens, Exception):
                outputs.append(self._fail(item.sequence, tokens))
            else:
                self.block_manager.commit(item.sequence)
                if token is not None:
                    outputs.append(self._report(item.sequence, token))
        return outputs

    def _tokens(self, done: _InFlight) -> Iterator[SampledToken] | Exception:
        """Waits for a step."""
        try:
            if isinstance(done.step, Exception):
                raise done.step
            tokens = done.step.tokens()
            expected = sum(item.sample for item in done.batch.items)
            if len(tokens) != expected:
                raise RuntimeError(f"the runner sampled {len(tokens)} tokens where {expected} were due")
        except Exception as error:
            log.exception("step failed", requests=[item.sequence.request_id for item in done.batch.items])
            return error
        now_s = self.clock()
        self._num_steps += 1
        self._step_ms = (now_s - max(done.started_s, self._landed_s)) * 1e3
        self._landed_s = now_s
        self.timed_steps.add(done.batch, self._step_ms)
        return iter(tokens)

    def _land(self, item: ScheduledSequence, token: SampledToken | None) -> None:
        """What the step did is on the books now instead of on its way."""
        sequence = item.sequence
        sequence.num_in_flight_tokens -= item.num_tokens
        if sequence.status is not SequenceStatus.FINISHED:
            sequence.num_computed_tokens = item.end
            if token is not None:
                sequence.token_ids[item.end] = token.token_id
                sequence.num_pending_tokens -= 1
        if not sequence.num_in_flight_tokens:
            self.block_manager.settle(sequence)

    def _publish(self, num_tokens: int, outputs: list[SequenceOutput]) -> StepOutput:
        return StepOutput(outputs, self.block_manager.take_events(), num_tokens)

    # --- how a sequence goes on or ends -------------------------------------------------------------------------------

    def _report(self, sequence: Sequence, token: SampledToken) -> SequenceOutput:
        """`token` is the last of the sequence's that are known."""
        finish, stop_token = self._finish_reason(sequence, token.token_id)
        if finish is not None:
            self._finish(sequence)
        logprobs = [] if token.logprobs is None else [token.logprobs]
        return SequenceOutput(sequence, [token.token_id], logprobs, finish, stop_token)

    def _finish_reason(self, sequence: Sequence, token_id: int) -> tuple[str | None, int | None]:
        """(finish, stop token). The sampler sees to it that nothing stops before min_tokens."""
        sampling = sequence.sampling
        if sequence.prefill_only:
            return "prefill", None
        if token_id in sampling.stop_token_ids or (token_id in self.eos_token_ids and not sampling.ignore_eos):
            return "stop", token_id
        if sequence.num_output_tokens - sequence.num_pending_tokens >= sampling.max_tokens:
            return "length", None
        return None, None

    def _fail(self, sequence: Sequence, error: Exception) -> SequenceOutput:
        """What the failed step wrote was never committed, so freeing the blocks forgets it."""
        self._finish(sequence)
        return SequenceOutput(sequence, [], [], "error", error=f"the step failed: {type(error).__name__}: {error}")

    def _dead_ends(self) -> list[SequenceOutput]:
        ends = self.scheduler.take_dead_ends()
        ends = [end for end in ends if self._sequences.get(end.sequence.request_id) is end.sequence]  # not aborted
        for end in ends:
            del self._sequences[end.sequence.request_id]
        return [SequenceOutput(end.sequence, [], [], end.finish, error=end.error) for end in ends]

    def _register(self, sequence: Sequence) -> None:
        if sequence.request_id in self._sequences:
            raise InvalidRequestError("request_id", f"{sequence.request_id!r} is already running on this worker")
        self._sequences[sequence.request_id] = sequence

    def _finish(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        while sequence.token_ids[-1] == PENDING:  # nobody will learn these
            sequence.token_ids.pop()
        sequence.num_pending_tokens = 0
        self.scheduler.finish(sequence)

    # --- what others want to know -------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step has something to try; it can still come out empty, see StepOutput."""
        return bool(self._in_flight) or self.scheduler.has_work or self.block_manager.has_events

    def load(self) -> WorkerLoad:
        """Leases and the last event id are the worker's to fill in."""
        queued_tokens, queued_pairs = self.scheduler.queued_prefill
        return WorkerLoad(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            blocks_used=self.block_manager.num_used,
            blocks_cached=self.block_manager.num_cached,
            blocks_total=self.block_manager.num_blocks,
            queued_prefill_tokens=queued_tokens,
            queued_prefill_pairs=queued_pairs,
            steps=self._num_steps,
            step_ms=self._step_ms,
        )

    def context_tokens(self) -> int:
        """Of the running sequences together."""
        return sum(sequence.num_tokens for sequence in self.scheduler.running)

    def check_integrity(self) -> list[str]:
        """Between steps. Returns what is wrong, in sentences; empty when all is well."""
        problems = self.block_manager.check_integrity() + self.scheduler.check_integrity()
        known = {*self.scheduler.waiting, *self.scheduler.running}
        problems.extend(f"{s} is queued without being registered" for s in known - set(self._sequences.values()))
        return problems
