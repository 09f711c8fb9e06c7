"""One choice of a request: waits for workers, streams from them, and is replayed when they are lost, or when its client
reads on after it had stopped.

What the client has is `output`. A replay submits prompt and output together. Because the engines' random stream depends
on the position alone, the next worker goes on exactly where the lost one stopped.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field

import numpy as np
import structlog
from msgspec.structs import replace
from numpy.typing import NDArray

from baton_proto.discovery import prefill_pairs
from baton_proto.sampling import PromptLogprobs, TokenLogprobs
from baton_proto.worker import Delta, Failure, Submit
from router.counters.metrics import RouterMetrics
from router.counters.tally import Tally
from router.placement.assignment import Assigner, Assignment
from router.placement.candidates import Request, Work
from router.placement.decisions import Decision, DecisionLog
from router.placement.early_refusal import TooLate, check_in_time
from router.placement.placement import Placement, Weighing
from router.requests.admission import AdmissionQueue, Ticket, Turn
from router.requests.answer import Answer
from router.requests.failed_workers import FailedWorkers
from router.requests.request import GenerateRequest, Piece
from router.requests.shared_prompt import SharedPrompt
from router.text.tokenizer import Tokenizer
from router.workers.inbox import UnreadError, cut_after
from router.workers.pool import WorkerPool, largest
from router.workers.submission import Submission
from router.workers.waking import AGAIN_S, Waking
from runtime.blocks.block_hash import lora_seed, with_images
from runtime.blocks.xxh3 import block_hashes
from runtime.config.serving import RouterConfig
from runtime.discovery.worker_key import WorkerKey
from runtime.errors import (
    DeadlineError,
    InvalidRequestError,
    ProtocolError,
    TooLateError,
    UnavailableError,
    WorkerLostError,
)

MAX_ATTEMPTS = 4  # of a choice whose workers are lost, whatever the reason
MAX_DEATHS = 2  # of workers that have a request, which may be the cause: it gets no third
FAR_TOKENS = 16  # so many tokens behind the place where the last worker died, the next one dies of something else
NO_HASHES = np.empty(0, dtype=np.uint64)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Parts:
    """What the choices of all requests work with."""

    tokenizer: Tokenizer
    block_size: int
    config: RouterConfig
    pool: WorkerPool
    assigner: Assigner
    queue: AdmissionQueue
    metrics: RouterMetrics
    waking: Waking
    decisions: DecisionLog = field(default_factory=DecisionLog)


class _TurnedError(Exception):
    """The client has other tokens than the worker: it has to go on from them, like one that replays."""


class _UnsupportedError(Exception):
    """The worker's kind of engine cannot serve the choice; another worker may."""


class Choice:
    def __init__(
        self, parts: Parts, request: GenerateRequest, tally: Tally, ticket: Ticket, prompt: SharedPrompt
    ) -> None:
        self.output: list[int] = []
        self._prompt = prompt
        self._tally = tally
        self._parts = parts
        self._request = request
        self._sampling = request.sampling[tally.index]
        self._owes_logprobs = self._sampling.prompt_logprobs is not None  # of the prompt, with the first piece
        if tally.index:  # the first choice has them computed
            self._sampling = replace(self._sampling, prompt_logprobs=None)
        self._max_tokens = len(request.prompt) + self._sampling.max_tokens  # of prompt and output
        self._ticket = ticket
        self._answer = Answer(parts.tokenizer, request, tally.index)
        self._losses = 0  # of workers
        self._placing_s = 0.0  # how long the last decision took
        self._tokens_due = len(request.prompt)  # what the tenant pays for the next attempt
        self._failed_workers = FailedWorkers(parts.pool.returns)
        self._hashes = NO_HASHES  # of the last attempt's blocks
        self._cuts = request.cuts[tally.index] if request.cuts else ()

    async def stream(self) -> AsyncGenerator[Piece, None]:
        """Ends after the piece with a finish reason. Raises as Generator.generate does.

        One generator serves all attempts, because passing a piece through another one costs as much as making it.
        """
        try:
            for begun in self._begun():
                yield begun
                if begun.finish_reason is not None:
                    return
            await self._prompt.turn(self._tally.index)
            request = self._request
            while True:
                self._tally.attempt()
                try:
                    tokens = self._tokens()
                    excluded = self._failed_workers.now()
                    facts = Request(
                        len(tokens), self._parts.block_size, excluded, self._answer.weights, request.adapter
                    )
                    began_s = time.monotonic()
                    with self._turn(facts, tokens) as turn:
                        assignment = await self._wait(turn, facts)
                        self._note_placement(facts, assignment, time.monotonic() - began_s)
                        with self._submit(assignment, tokens) as inbox:
                            while True:
                                deltas = await inbox.take()
                                for news in self._in_pieces(deltas) if self._cuts else (deltas,):
                                    piece = self._accept(news, assignment)
                                    if piece is not None:
                                        yield piece
                                        if piece.finish_reason is not None:
                                            return
                                        if self._answer.turned:
                                            raise _TurnedError
                                self._check_goes_on(deltas[-1], assignment)
                except WorkerLostError as lost:
                    self._note_loss(lost)
                except _UnsupportedError as unsupported:
                    self._tally.attempt_ended(str(unsupported))
                    self._tokens_due = 0
                except _TurnedError:
                    self._tally.attempt_ended("the budget for reasoning was used up")
                    self._tokens_due = 0
                except UnreadError:  # all that was computed is read by now
                    self._tally.attempt_ended("the client had stopped reading")
                    self._tokens_due = len(self._request.prompt) + len(self.output)
                    log.debug("client reads on", request_id=self._request.request_id, tokens=len(self.output))
        finally:
            self._tally.ended()
            self._prompt_done()

    def _begun(self) -> Iterator[Piece]:
        """The pieces of what the client has. Only tokens that no answer has can bring its end."""
        begun = self._request.begun[self._tally.index] if self._request.begun else ()
        for cut in self._cuts if begun else ():
            while news := list(begun[len(self.output) : cut]):
                piece = self._answer.take(news, [], None, None)
                self.output += piece.token_ids
                self._tokens_due += len(piece.token_ids)
                yield piece

    def _note_loss(self, lost: WorkerLostError) -> None:
        """Raises UnavailableError when that was the last attempt."""
        self._losses += 1
        self._tokens_due = 0  # the tenant is not to blame
        self._tally.worker_lost(str(lost))
        log.warning("worker lost in a request", request_id=self._request.request_id, reason=str(lost))
        if self._tally.tokens.output_tokens - self._tally.tried[-1].output_before > FAR_TOKENS:
            self._prompt.died.clear()
            self._prompt.lost.clear()
        if lost.died is not None:
            self._prompt.died.add(lost.died)
        died = self._prompt.died.union(filter(self._parts.pool.has_died, self._prompt.lost))
        if len(died) >= MAX_DEATHS:
            names = " and ".join(sorted(name for name, _ in died))
            raise UnavailableError(f"{names} died with this request, which gets no further worker: {lost}") from lost
        if self._losses >= MAX_ATTEMPTS:
            raise UnavailableError(f"all {self._losses} attempts lost their workers; the last one: {lost}") from lost

    # --- one attempt: from its turn in the queue to its submission ----------------------------------------------------

    def _tokens(self) -> NDArray[np.uint32]:
        """The prompt and what the client has already, [num_tokens]."""
        if not self.output:
            return self._request.prompt
        return np.concatenate([self._request.prompt, np.array(self.output, dtype=np.uint32)])

    def _turn(self, facts: Request, tokens: NDArray[np.uint32]) -> Turn[Assignment]:
        parts, request = self._parts, self._request
        hashes = block_hashes(tokens, parts.block_size, lora_seed(request.adapter, request.hash_seed))
        hashes = self._hashes = with_images(hashes, request.images, parts.block_size)
        if self._sampling.prompt_logprobs is not None:
            hashes = hashes[:0]  # because the whole prompt is computed, wherever it is cached

        def assign() -> Assignment | None:
            began_s = time.monotonic()
            due_ms = self._due_ms(began_s)
            is_dated = self._due_on_worker() is not None
            now = replace(facts, excluded=self._failed_workers.now()) if facts.excluded else facts
            assignment = parts.assigner.assign(
                request.request_id, now, self._max_tokens, hashes, due_ms, is_dated=is_dated
            )
            self._placing_s = time.monotonic() - began_s
            return assignment

        return parts.queue.turn(self._ticket, assign, self._tokens_due)

    async def _wait(self, turn: Turn[Assignment], facts: Request) -> Assignment:
        """Waits for the turn. Raises TooLateError, also at once where the queue is too long, and as _patiently."""
        try:
            if self._due_ms() < math.inf and not turn.is_decided:
                self._check_queue(turn, facts)
            return await self._patiently(turn, facts)
        except TooLate as late:
            if self._request.deadline_s <= time.monotonic():
                raise self._late() from None
            self._remember(facts, late.weighing, None, late.expected_ms)
            raise TooLateError(late.expected_ms / 1e3, self._due_ms() / 1e3) from None

    def _due_ms(self, now_s: float | None = None) -> float:
        """Time until the first token is due. Infinite for what has begun: a replay, or another choice of the
        request."""
        if self._tally.index or self._tally.attempts > 1:
            return math.inf
        return (self._request.first_by_s - (time.monotonic() if now_s is None else now_s)) * 1e3

    def _due_on_worker(self) -> int | None:
        """Submit.due_ms; None: the worker minds none, because only the whole answer is due."""
        due_ms = self._due_ms()
        only_whole = self._request.first_by_s >= self._request.deadline_s
        return None if due_ms == math.inf or only_whole else max(0, round(due_ms))

    def _check_queue(self, turn: Turn[Assignment], facts: Request) -> None:
        """Raises TooLate. Of those before it as much is taken for cached as of those that have run."""
        parts, cached = self._parts, self._parts.metrics.totals.hit_rate or 0.0
        weighing = parts.assigner.weigh_soonest(
            facts, self._max_tokens, self._hashes, is_dated=self._due_on_worker() is not None
        )
        starts = [(n, round(n * cached)) for n in parts.queue.prompts_before(turn)]
        before = Work(sum(n - start for n, start in starts), sum(prefill_pairs(start, n) for n, start in starts))
        check_in_time(weighing, before, self._due_ms())

    async def _patiently(self, turn: Turn[Assignment], facts: Request) -> Assignment:
        """Wakes workers that all sleep. Raises DeadlineError, InvalidRequestError when no worker is large enough,
        AsleepError, and UnavailableError when no worker that can serve has been ready for `no_worker_timeout_s`."""
        began_s = time.monotonic()
        timeout_s = 0.0
        waking: asyncio.Task[None] | None = None
        while (assignment := await turn.wait(timeout_s, waking)) is None:
            timeout_s = self._request.deadline_s - time.monotonic()
            if timeout_s <= 0:
                raise self._late()
            self._check_fits()
            rests = self._parts.pool.rests()
            waking = self._parts.waking.question() if rests else None
            is_heard = rests and self._parts.waking.is_heard
            since_s = max(began_s, self._parts.pool.no_decode_since_s or 0.0)
            left_s = self._parts.waking.left_s(since_s) if is_heard else self._until_there(since_s)
            timeout_s = min(timeout_s, left_s, AGAIN_S if facts.excluded else left_s)
        return assignment

    def _until_there(self, since_s: float) -> float:
        """Seconds for which the choice waits on for a worker. Raises UnavailableError."""
        patience_s = self._parts.config.no_worker_timeout_s
        if self._has_worker():
            return patience_s
        if (left_s := since_s + patience_s - time.monotonic()) <= 0:
            able = f"has the adapter {self._request.adapter}" if self._request.adapter else "can serve"
            able = "has the weights that the answer was begun with" if self._answer.weights else able
            absent = self._parts.pool.absent()
            raise UnavailableError(f"no decode worker that {able} was ready for {patience_s:.1f} s{absent}")
        return left_s

    def _note_placement(self, facts: Request, assignment: Assignment, waited_s: float) -> None:
        self._tally.placed(assignment, waited_s, self._placing_s)
        placement = assignment.placement
        self._remember(facts, placement.weighing, placement, placement.ttft_ms, waited_s)

    def _remember(
        self,
        facts: Request,
        weighing: Weighing,
        placement: Placement | None,
        expected_ms: float,
        waited_s: float = 0.0,
    ) -> None:
        decision = Decision(
            self._request.request_id,
            self._tally.index,
            self._tally.attempts,
            time.monotonic(),
            waited_s,
            facts,
            weighing,
            placement,
            expected_ms,
        )
        self._parts.decisions.add(decision)

    def _has_worker(self, besides: WorkerKey | None = None) -> bool:
        """Whether a decode worker could take this choice, now or when it is less busy."""
        able = self._parts.pool.ready_decode(self._max_tokens, self._request.adapter)
        excluded = self._failed_workers.now()
        return any(
            worker.key != besides and worker.key not in excluded and self._answer.weights in (0, worker.weights)
            for worker in able
        )

    def _check_fits(self) -> None:
        """Raises InvalidRequestError when there are workers and all are too small, those that come back among them."""
        pool = self._parts.pool
        limit = largest(pool.ready_decode(adapter=self._request.adapter))
        if limit is not None and max(limit, pool.longest_away()) < self._max_tokens and not self.output:
            problem = f"{len(self._request.prompt)} prompt tokens and {self._sampling.max_tokens} of output"
            raise InvalidRequestError("prompt", f"{problem} are more than any worker takes: {limit} tokens")

    def _submit(self, assignment: Assignment, tokens: NDArray[np.uint32]) -> Submission:
        request = self._request
        submit = Submit(
            request_id=f"{request.request_id}/{self._tally.index}.{self._tally.attempts}",
            token_ids=tokens.astype("<u4", copy=False).tobytes(),
            num_prompt_tokens=len(request.prompt),
            sampling=self._sampling,
            timeout_s=max(0.0, request.deadline_s - time.monotonic()),
            prefill=assignment.prefill,
            priority=request.priority,
            hash_seed=request.hash_seed,
            hint=request.hint,
            due_ms=self._due_on_worker(),
            weights=self._answer.weights,
            images=list(request.images),
            pooling=request.pooling,
            adapter=request.adapter,
        )
        return Submission(assignment.link, submit, self._late, assignment.release)

    # --- what the worker says -----------------------------------------------------------------------------------------

    def _in_pieces(self, deltas: list[Delta]) -> Iterator[list[Delta]]:
        """The news, cut where the request wants pieces to end."""
        for cut in self._cuts:
            if deltas and (ahead := cut - len(self.output)) > 0:
                news, deltas = cut_after(deltas, ahead)
                yield news
        if deltas:
            yield deltas

    def _accept(self, deltas: list[Delta], assignment: Assignment) -> Piece | None:
        """Makes the news of one or more steps one piece; None when they hold no output."""
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        prompt_logprobs: PromptLogprobs | None = None
        weights, request = self._answer.weights, self._request
        for delta in deltas:
            token_ids += delta.token_ids
            logprobs += delta.logprobs
            if delta.prompt_counts is not None:
                self._tally.prompt_done(assignment.placement, delta.prompt_counts, delta.handoff, delta.timeline)
            prompt_logprobs = prompt_logprobs or delta.prompt_logprobs
            weights = weights or delta.weights
            self._tally.accepted_tokens += delta.accepted_tokens
            if delta.seen is not None and request.images:
                images = self._parts.tokenizer.images
                self._prompt.num_tokens = images.learn(request.prompt.tolist(), request.images, delta.seen)
        if logprobs and len(logprobs) != len(token_ids):
            raise ProtocolError(assignment.link.worker[0], f"{len(logprobs)} logprobs for {len(token_ids)} tokens")
        finish = deltas[-1].finish if deltas[-1].finish in ("stop", "length", "repetition") else None
        if not token_ids and finish is None:
            return None
        self._answer.weights = weights
        piece = self._answer.take(token_ids, logprobs, finish, deltas[-1].stop_token)
        if token_ids:
            self._tally.output(assignment, len(token_ids))
            assignment.prefill_done()
            assignment.charge.grow(len(self._request.prompt) + len(self.output) + len(token_ids))
        self.output += token_ids
        if request.pooling is not None:
            if not deltas[-1].pooled:
                raise ProtocolError(assignment.link.worker[0], "an answer without what was asked for")
            piece = replace(piece, pooled=deltas[-1].pooled)
        if self._owes_logprobs:
            piece = self._with_prompt_logprobs(piece, prompt_logprobs, assignment)
        if token_ids and self._leads_others:
            self._parts.assigner.computed(assignment.placement.decode, self._hashes)
            self._prompt_done()
        return piece

    def _with_prompt_logprobs(self, piece: Piece, found: PromptLogprobs | None, assignment: Assignment) -> Piece:
        """The first piece. A replay does not ask for them again."""
        if self._sampling.prompt_logprobs is not None:
            if found is None or not found.fits(len(self._request.prompt)):
                problem = "sent no log-probabilities of the prompt, or not all of them"
                raise ProtocolError(assignment.link.worker[0], problem)
            self._prompt.logprobs = found
            self._sampling = replace(self._sampling, prompt_logprobs=None)
        self._owes_logprobs = False
        return replace(piece, prompt_logprobs=self._prompt.logprobs)

    @property
    def _leads_others(self) -> bool:
        return not self._tally.index and self._prompt.is_awaited

    def _prompt_done(self) -> None:
        if self._leads_others:
            self._prompt.computed()

    def _check_goes_on(self, delta: Delta, assignment: Assignment) -> None:
        """Raises what the worker's last word means, if this is it; WorkerLostError: the choice goes on elsewhere."""
        if delta.failure is not None:
            raise self._failed(delta.failure, assignment)
        if delta.finish is not None:
            raise WorkerLostError(assignment.link.worker[0], f"ended the request as {delta.finish!r}")

    def _failed(self, failure: Failure, assignment: Assignment) -> Exception:
        blamed = failure.worker_id or assignment.link.worker[0]
        if failure.code == "deadline":
            return self._late()
        if not failure.retryable:
            if failure.code == "invalid":
                return InvalidRequestError(self._request.grammar_field, failure.message)
            if failure.code == "refused":
                return InvalidRequestError("prompt", f"worker {blamed} refused it: {failure.message}")
            return ProtocolError(f"worker {blamed}", failure.message)
        if failure.code == "unsupported":
            return self._unsupported(f"worker {blamed} cannot serve it: {failure.message}", assignment)
        prefill = assignment.placement.prefill
        if prefill is not None and (failure.code == "prefill_lost" or blamed == prefill[0]):
            self._failed_workers.add(prefill)
            if failure.code == "prefill_lost":
                self._prompt.lost.add(prefill)
        elif failure.code == "refused" or self._has_worker(besides=assignment.link.worker):
            # A worker that failed once is still better than none; one that refuses is not.
            self._failed_workers.add(assignment.link.worker)
        return WorkerLostError(blamed, failure.message)

    def _unsupported(self, problem: str, assignment: Assignment) -> Exception:
        """Final when no other worker is left. A client that has a part of the answer has asked for nothing wrong."""
        self._failed_workers.add(assignment.link.worker)
        if self._has_worker():
            return _UnsupportedError(problem)
        return UnavailableError(problem) if self.output or self._losses else InvalidRequestError("request", problem)

    def _late(self) -> DeadlineError:
        return DeadlineError("the request", self._request.deadline_s - self._tally.arrived_s)
