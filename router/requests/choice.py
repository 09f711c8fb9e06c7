"""One choice of a request: waits for workers, streams from them, and is replayed when they are lost.

What the client has is `output`. A replay submits prompt and output together, and the engines' random stream depends on
the position alone, so the next worker goes on exactly where the lost one stopped.
"""

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import numpy as np
import structlog
from numpy.typing import NDArray

from baton_proto.placement_words import PLACED
from baton_proto.sampling import TokenLogprobs
from baton_proto.worker import Delta, Failure, Handoff, Submit
from router.counters.metrics import RouterMetrics
from router.counters.totals import Totals
from router.counters.traffic import Traffic
from router.placement.assignment import Assigner, Assignment
from router.placement.candidates import Request
from router.placement.cost import SHORT
from router.placement.decisions import DecisionLog
from router.requests.admission import AdmissionQueue, Ticket, Turn
from router.requests.request import GenerateRequest, Piece, Service
from router.text.output_text import OutputText
from router.text.tokenizer import Tokenizer
from router.workers.pool import WorkerPool, largest
from router.workers.submission import Submission
from runtime.blocks.block_hash import block_hashes
from runtime.config.serving import RouterConfig
from runtime.discovery.worker_key import WorkerKey
from runtime.errors import DeadlineError, InvalidRequestError, ProtocolError, UnavailableError, WorkerLostError

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
    decisions: DecisionLog = field(default_factory=DecisionLog)
    traffic: Traffic = field(default_factory=Traffic)
    totals: Totals = field(default_factory=Totals)


class Choice:
    def __init__(self, parts: Parts, request: GenerateRequest, index: int, ticket: Ticket) -> None:
        self.service = Service(index)
        self.output: list[int] = []
        self._parts = parts
        self._request = request
        self._sampling = request.sampling[index]
        self._ticket = ticket
        self._text = OutputText(parts.tokenizer, request.stop, self._sampling.min_tokens)
        self._excluded: set[WorkerKey] = set()
        self._started_s = self._first_s = self._last_s = time.monotonic()
        self._cached_known = False

    async def stream(self) -> AsyncGenerator[Piece, None]:
        """Ends after the piece with a finish reason. Raises as Generator.generate does.

        One generator for all attempts: each that a piece passes through costs as much as making the piece.
        """
        self._parts.totals.arrived(len(self._request.prompt))
        try:
            while True:
                self.service.attempts += 1
                try:
                    tokens = self._tokens()
                    facts = Request(len(tokens), self._parts.block_size, frozenset(self._excluded))
                    began_s = time.monotonic()
                    with self._turn(facts, tokens) as turn:
                        assignment = await self._wait(turn)
                        self._remember(facts, assignment, time.monotonic() - began_s)
                        with self._submit(assignment, tokens) as inbox:
                            while True:
                                deltas = await inbox.take()
                                piece = self._accept(deltas, assignment)
                                if piece is not None:
                                    yield piece
                                    if piece.finish_reason is not None:
                                        return
                                self._check_goes_on(deltas[-1], assignment)
                except WorkerLostError as lost:
                    self._note_loss(lost)
        finally:
            self._parts.totals.ended(len(self.output), self._last_s - self._first_s)

    def _note_loss(self, lost: WorkerLostError) -> None:
        """Raises UnavailableError when that was the last attempt."""
        self._parts.metrics.failovers += 1
        log.warning("worker lost in a request", request_id=self._request.request_id, reason=str(lost))
        if self.service.attempts >= self._parts.config.max_attempts:
            attempts = self.service.attempts
            raise UnavailableError(f"all {attempts} attempts lost their workers; the last one: {lost}") from lost

    # --- one attempt --------------------------------------------------------------------------------------------------

    def _tokens(self) -> NDArray[np.uint32]:
        """Of the prompt and of what the client has already."""
        if not self.output:
            return self._request.prompt
        return np.concatenate([self._request.prompt, np.array(self.output, dtype=np.uint32)])

    def _turn(self, facts: Request, tokens: NDArray[np.uint32]) -> Turn[Assignment]:
        """To get workers."""
        parts, request = self._parts, self._request
        hashes = block_hashes(tokens, parts.block_size)

        def assign() -> Assignment | None:
            return parts.assigner.assign(request.request_id, facts, self._max_tokens, hashes)

        paid = self.service.attempts > 1  # the tenant is not to blame for a lost worker
        return parts.queue.turn(self._ticket, assign, 0 if paid else len(tokens))

    @property
    def _max_tokens(self) -> int:
        return len(self._request.prompt) + self._sampling.max_tokens

    async def _wait(self, turn: Turn[Assignment]) -> Assignment:
        """For the turn, the deadline, or the end of patience with a service that has no worker."""
        patience_s = self._parts.config.no_worker_timeout_s
        began_s = time.monotonic()
        timeout_s = 0.0
        while (assignment := await turn.wait(timeout_s)) is None:
            now = time.monotonic()
            timeout_s = self._request.deadline_s - now
            if timeout_s <= 0:
                raise self._late()
            self._check_fits()
            absent_since_s = None if self._has_worker() else max(began_s, self._parts.pool.no_decode_since_s or 0.0)
            left_s = patience_s if absent_since_s is None else absent_since_s + patience_s - now
            if left_s <= 0:
                raise UnavailableError(f"no decode worker that can serve was ready for {patience_s:.1f} s")
            timeout_s = min(timeout_s, left_s)
        return assignment

    def _remember(self, facts: Request, assignment: Assignment, waited_s: float) -> None:
        """For whoever asks why the choice went where it went."""
        self._parts.traffic.placed += 1
        self._parts.metrics.queue_wait_s.observe(waited_s)
        self._parts.decisions.add(
            self._request.request_id,
            self.service.index,
            self.service.attempts,
            waited_s,
            facts,
            assignment.placement,
        )

    def _has_worker(self, besides: WorkerKey | None = None) -> bool:
        """A decode worker that could take this choice, now or when it is less busy."""
        able = self._parts.pool.ready_decode(self._max_tokens)
        return any(worker.key != besides and worker.key not in self._excluded for worker in able)

    def _check_fits(self) -> None:
        """Raises InvalidRequestError when there are workers and all are too small."""
        limit = largest(self._parts.pool.ready_decode())
        if limit is not None and limit < self._max_tokens and not self.output:
            problem = f"{len(self._request.prompt)} prompt tokens and {self._sampling.max_tokens} of output"
            raise InvalidRequestError("prompt", f"{problem} are more than any worker takes: {limit} tokens")

    def _submit(self, assignment: Assignment, tokens: NDArray[np.uint32]) -> Submission:
        request = self._request
        submit = Submit(
            request_id=f"{request.request_id}/{self.service.index}.{self.service.attempts}",
            token_ids=tokens.astype("<u4", copy=False).tobytes(),
            num_prompt_tokens=len(request.prompt),
            sampling=self._sampling,
            timeout_s=max(0.0, request.deadline_s - time.monotonic()),
            prefill=assignment.prefill,
            priority=request.priority,
        )
        self.service.decode_worker = assignment.link.worker[0]
        self.service.prefill_worker = assignment.prefill.worker_id if assignment.prefill else ""
        self._parts.metrics.placements[PLACED[assignment.placement.reason]] += 1
        return Submission(assignment.link, submit, self._late)

    # --- what the worker says -----------------------------------------------------------------------------------------

    def _accept(self, deltas: list[Delta], assignment: Assignment) -> Piece | None:
        """The news of one or more steps as one piece; None when they hold no output."""
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for delta in deltas:
            token_ids += delta.token_ids
            logprobs += delta.logprobs
            if delta.cached_tokens is not None:
                self._note_start(delta.cached_tokens, delta.handoff, assignment)
        if logprobs and len(logprobs) != len(token_ids):
            raise ProtocolError(assignment.link.worker[0], f"{len(logprobs)} logprobs for {len(token_ids)} tokens")
        finish = deltas[-1].finish if deltas[-1].finish in ("stop", "length") else None
        if not token_ids and finish is None:
            return None
        accepted, text, stopped = self._text.push(token_ids, deltas[-1].stop_token)
        if token_ids:
            self._note_tokens(accepted, assignment)
        del token_ids[accepted:], logprobs[accepted:]
        self.output += token_ids
        if stopped:
            finish = "stop"
        elif finish is not None:
            text += self._text.flush()
        return Piece(self.service.index, token_ids, text, finish, logprobs)

    def _note_start(self, cached_tokens: int, handoff: Handoff | None, assignment: Assignment) -> None:
        if not self._cached_known:  # a replay finds its own prompt cached, the client's request did not
            self._cached_known = True
            self.service.cached_tokens = min(cached_tokens, len(self._request.prompt))
            placement = assignment.placement
            ran_on = placement.prefill or placement.decode
            self._parts.traffic.prompt_done(ran_on, len(self._request.prompt), self.service.cached_tokens)
            here = placement.reason == SHORT
            self._parts.totals.started(len(self._request.prompt), self.service.cached_tokens, here)
        if handoff is not None:
            self.service.prefill_worker = handoff.prefill_worker
            self.service.kv_blocks += handoff.kv_blocks
            self.service.kv_bytes += handoff.kv_bytes
            self.service.transport = handoff.transport

    def _note_tokens(self, count: int, assignment: Assignment) -> None:
        now = time.monotonic()
        if not self.output:
            self._first_s = now
            self._parts.metrics.ttft_s.observe(now - self._started_s)
            self._parts.totals.first_token(now - self._started_s)
        else:
            self._parts.metrics.itl_s.observe((now - self._last_s) / max(1, count))
        self._last_s = now
        self._parts.traffic.output(assignment.link.worker, count)
        assignment.prefill_done()
        assignment.charge.grow(len(self._request.prompt) + len(self.output) + count)

    def _check_goes_on(self, delta: Delta, assignment: Assignment) -> None:
        """Raises what the worker's last word on the request means, if this is it; WorkerLostError: it has to go on
        elsewhere."""
        if delta.failure is not None:
            raise self._failed(delta.failure, assignment)
        if delta.finish is not None:
            raise WorkerLostError(assignment.link.worker[0], f"ended the request as {delta.finish!r}")

    def _failed(self, failure: Failure, assignment: Assignment) -> Exception:
        blamed = failure.worker_id or assignment.link.worker[0]
        if failure.code == "deadline":
            return self._late()
        if not failure.retryable:
            if failure.code == "refused":
                return InvalidRequestError("prompt", f"worker {blamed} refused it: {failure.message}")
            return ProtocolError(f"worker {blamed}", failure.message)
        prefill = assignment.placement.prefill
        if prefill is not None and (failure.code == "prefill_lost" or blamed == prefill[0]):
            self._excluded.add(prefill)
        elif failure.code == "refused" or self._has_worker(besides=assignment.link.worker):
            # A worker that failed once is still better than none; one that refuses is not.
            self._excluded.add(assignment.link.worker)
        return WorkerLostError(blamed, failure.message)

    def _late(self) -> DeadlineError:
        return DeadlineError("the request", self._request.deadline_s - self._started_s)
