"""A worker of either role: takes requests from routers, has prompts run here or on a peer, streams tokens.

`_end` is the one place where a request ends for its router; `fail` also stops what the request was doing.
"""

import asyncio
import itertools
import time
from typing import Any

import numpy as np
import structlog
from msgspec import structs

from baton_proto.decoding import MAX_TEXT
from baton_proto.pooling import GENERATE
from baton_proto.routers.left import LeftAnswer
from baton_proto.timeline import Timeline, micros
from baton_proto.token_counts import TokenCounts
from baton_proto.worker import Delta, Failure, Submit
from engine.interface import Engine
from engine.sequences.output import SequenceOutput, StepOutput
from engine.sequences.sequence import Sequence
from runtime.errors import BatonError, InvalidRequestError
from runtime.grammar.matcher import Matcher
from worker.requests.compiling import Compiling
from worker.requests.in_flight import InFlight
from worker.requests.left_answers import LeftAnswers, is_of
from worker.requests.peers import Peers
from worker.requests.request import Phase, Request
from worker.runtime import WorkerRuntime
from worker.stamps import chunks_of, due_at
from worker.step_stream import RouterStream

NO_IMAGES = "it takes no images: vLLM does with a model for them, in a worker or a server with --enable-scale-out"

log = structlog.get_logger()


class Worker:
    """Implements `worker.requests.role.Role`. Event loop, where nothing else is said."""

    name: str

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime
        self._serial = itertools.count(1)
        self._by_key: dict[str, Request] = {}
        self._compiling: Compiling[RouterStream] = Compiling(runtime.matcher)
        self.in_flight: InFlight[Any, Any] = InFlight()
        self._left = LeftAnswers()
        self.peers = self.make_peers()

    def make_peers(self) -> Peers:
        raise NotImplementedError

    # --- commands of a router -----------------------------------------------------------------------------------------

    def submit(self, router: RouterStream, request: Submit) -> None:
        token_ids = np.frombuffer(request.token_ids, dtype="<u4").tolist()
        grammar = None if self._runtime.assembly.limits.masks else request.sampling.grammar

        def begin(matcher: Matcher | None = None) -> None:
            if problem := self._refusal(router, request, len(token_ids)):
                router.send(Delta(request.request_id, failure=problem))
            else:
                self._accept(router, request, token_ids, matcher)

        def failed(error: BatonError) -> None:
            again = not isinstance(error, InvalidRequestError)
            code = "refused" if again else "invalid"
            failure = Failure(code, str(error)[:MAX_TEXT], retryable=again, worker_id=self._runtime.worker_id)
            router.send(Delta(request.request_id, failure=failure))

        if grammar is None or self._refusal(router, request, len(token_ids)):
            begin()
        else:
            self._compiling.start((router, request.request_id), grammar, begin, failed)

    def _accept(self, router: RouterStream, request: Submit, token_ids: list[int], matcher: Matcher | None) -> None:
        sampling, assembly = request.sampling, self._runtime.assembly
        # Images stay where the answer is made, and nobody passes on what a server tells of a prompt beside its KV.
        stays = bool(request.images) or (assembly.passes and sampling.prompt_logprobs is not None)
        elsewhere = request.prefill is not None and not stays
        if elsewhere:  # that worker computes the log-probabilities of the prompt
            sampling = structs.replace(sampling, prompt_logprobs=None)
        sequence = Sequence(
            f"{request.request_id}/{next(self._serial)}",
            token_ids,
            request.num_prompt_tokens,
            sampling,
            priority=request.priority,
            hash_seed=request.hash_seed,
            hint=request.hint,
            matcher=matcher,
            due_s=due_at(request.due_ms),
            images=request.images,
            pooling=request.pooling,
            adapter=request.adapter,
        )
        # The KV of an answer that begins again would be that of the prompt and what the client has of the answer.
        begins_again = sequence.num_output_tokens > 0 and assembly.limits.repeats(sampling)
        phase = Phase.RESERVING if elsewhere and self.peers.asks and not begins_again else Phase.RUNNING
        accepted = Request(router, request, sequence, time.monotonic() + request.timeout_s, phase)
        accepted.timer = asyncio.get_running_loop().call_later(request.timeout_s, self.fail, accepted, accepted.late)
        self.in_flight.add(accepted.name, accepted)
        self._by_key[accepted.key] = accepted
        self._runtime.metrics.requests += 1
        if phase is Phase.RESERVING:
            self.peers.start(accepted)
        else:
            self._runtime.bridge.post(lambda engine: engine.add(sequence))

    def cancel(self, router: RouterStream, request_id: str) -> None:
        if self._compiling.cancel((router, request_id)):
            router.send(Delta(request_id, finish="cancelled"))
        elif request := self.in_flight.get((router, request_id)):
            phase = self._end(request, Delta(request_id, finish="cancelled"))
            self._leave(request, phase, "cancelled")

    def router_gone(self, router: RouterStream) -> None:
        self._compiling.cancel_of(router)
        for request in list(self._by_key.values()):
            if request.router is router:
                phase = self._end(request, None)
                self._leave(request, phase, "the router is gone")

    def left_answer(self, asked: LeftAnswer) -> bytes | None:
        """What is asked for of an answer that was left, where this worker has it."""
        requests = self._by_key.values()
        own = (each for each in requests if is_of(each.submit.request_id, asked.request_id))
        return self._left.find(asked, (each.sequence.output_token_ids for each in own))

    def _refusal(self, router: RouterStream, request: Submit, num_tokens: int) -> Failure | None:
        worker_id, limit = self._runtime.worker_id, self._runtime.assembly.max_model_len
        if self._runtime.draining:
            problem = f"the {self.name} worker is {self._runtime.state}"
            return Failure("refused", problem, retryable=True, worker_id=worker_id)
        if request.weights not in (0, self._runtime.weights):
            problem = "it has other weights than those that the answer was begun with"
            return Failure("refused", problem, retryable=True, worker_id=worker_id)
        key, asked = (router, request.request_id), request.sampling.max_tokens
        if key in self.in_flight or key in self._compiling:
            problem = "a request of this id is in flight already"
        elif not 1 <= request.num_prompt_tokens <= num_tokens < request.num_prompt_tokens + max(1, asked):
            problem = f"{num_tokens} tokens, {request.num_prompt_tokens} of the prompt, leave nothing to generate"
        elif request.num_prompt_tokens + asked > limit:
            problem = f"{request.num_prompt_tokens} + {asked} tokens are more than {limit}"
        elif unsupported := self._unsupported(request):
            return Failure("unsupported", unsupported, retryable=True, worker_id=worker_id)
        else:
            return None
        return Failure("refused", problem, retryable=False, worker_id=worker_id)

    def _unsupported(self, request: Submit) -> str:
        limits = self._runtime.assembly.limits
        if (task := GENERATE if request.pooling is None else request.pooling.task) not in limits.tasks:
            return f"its model does not {task}, but can {' and '.join(limits.tasks)}"
        if problem := self._runtime.assembly.lacks(request.adapter):
            return problem
        return NO_IMAGES if request.images and not limits.sees else limits.refuses(request.sampling)

    # --- output and end of requests -----------------------------------------------------------------------------------

    def step_done(self, output: StepOutput) -> None:
        """Engine thread."""
        self.peers.step_done(output)

    def outputs(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            self._runtime.metrics.output_tokens += len(output.token_ids)
            request = self._by_key.get(output.sequence.request_id)
            if request is None:
                continue  # a peer's prompt, or it ended while the step was running
            if output.finish is None and request.started and not output.logprobs:  # most are of this kind
                request.router.send_tokens(request.submit.request_id, output.token_ids)
                continue
            if output.finish == "error":
                self.fail(request, self._failure(request, output))
                continue
            delta = _delta(request, output, self._runtime.weights)
            if output.finish is None:
                request.router.send(delta)
            else:
                self._end(request, delta)

    def _failure(self, request: Request, output: SequenceOutput) -> Failure:
        """Why the engine ended the request. KV that a peer's engine has offered, and that did not come, is the peer's
        failure."""
        code, blamed = "invalid" if output.invalid else "unsupported" if output.refused else "internal", ""
        if output.sequence.transfer and request.handoff is not None and code == "internal":
            code, blamed = "prefill_lost", request.handoff.prefill_worker
            self._runtime.metrics.transfer_failures += 1
        reason = (output.error or "an engine step failed")[:MAX_TEXT]
        worker_id = blamed or self._runtime.worker_id
        return Failure(code, reason, retryable=not output.invalid, worker_id=worker_id)

    def fail(self, request: Request, failure: Failure) -> None:
        """Ends a request without an answer. Idempotent."""
        if request.phase is not Phase.ENDED:
            log.info("request failed", request_id=request.submit.request_id, code=failure.code, reason=failure.message)
            self._runtime.metrics.failures += 1
            phase = self._end(request, _failed(request, failure))
            self._abandon(request, phase, failure.message)

    def end_all(self, failure: Failure) -> None:
        for request in list(self._by_key.values()):
            self.fail(request, failure)
        self.peers.end_all(failure)

    def _end(self, request: Request, last: Delta | None) -> Phase:
        """Returns the phase that the request ended in. Invariant: nothing is sent for the request after `last`."""
        phase, request.phase = request.phase, Phase.ENDED
        if request.timer is not None:
            request.timer.cancel()
        self.in_flight.discard(request.name)
        del self._by_key[request.key]
        if last is not None:
            request.router.send(last)
        return phase

    def _leave(self, request: Request, phase: Phase, reason: str) -> None:
        """Ends the work for an answer whose client or router is gone, who may come back for the rest."""
        self._left.keep(request.submit.request_id, request.sequence.output_token_ids)
        self._abandon(request, phase, reason)

    def _abandon(self, request: Request, phase: Phase, reason: str) -> None:
        if phase is Phase.RUNNING:
            self._runtime.bridge.post(lambda engine: self._abort(engine, request))
        else:
            self.peers.abandon(request, phase, reason)

    def _abort(self, engine: Engine, request: Request) -> None:
        """Engine thread. Because an abort is no step, step_done() does not tell that blocks are free."""
        engine.abort(request.key)
        self.peers.blocks_freed()

    def check_integrity(self) -> list[str]:
        problems = self.peers.check_integrity()
        requests, prompts = len(self._by_key), self.peers.num_prompts
        if requests + prompts != len(self.in_flight):
            problems.append(f"{requests} sequences and {prompts} transfers for {len(self.in_flight)} in flight")
        return problems


def _delta(request: Request, output: SequenceOutput, weights: int) -> Delta:
    delta = Delta(
        request_id=request.submit.request_id,
        token_ids=output.token_ids,
        logprobs=output.logprobs,
        prompt_counts=None if request.started else _prompt_counts(request),
        handoff=None if request.started else request.handoff,
        finish=output.finish,
        stop_token=output.stop_token,
        accepted_tokens=request.sequence.num_accepted_tokens if output.finish else 0,
        timeline=None if request.started else _timeline(request),
        prompt_logprobs=output.prompt_logprobs or request.prompt_logprobs,
        weights=0 if request.started else weights,
        seen=None if request.started else request.sequence.seen,
        pooled=output.pooled,
    )
    request.started, request.prompt_logprobs = True, None
    return delta


def _prompt_counts(request: Request) -> TokenCounts:
    own = request.sequence.prompt_counts
    if request.handoff is None:
        return own
    theirs = request.handoff.prompt_counts
    if request.prompt_logprobs is not None:  # all of it was computed, though less was shipped
        return theirs
    return min(own, theirs, key=lambda counts: counts.computed_tokens)


def _timeline(request: Request) -> Timeline:
    """The first token leaves now."""
    first_us = micros(time.monotonic() - request.accepted_s)
    if request.timeline is not None:
        return structs.replace(request.timeline, first_us=first_us)
    return Timeline(first_us, chunks=chunks_of(request.sequence, request.accepted_s))


def _failed(request: Request, failure: Failure) -> Delta:
    return Delta(request.submit.request_id, failure=failure)
