"""Prompts of decode workers: each is accepted, and seen through to the end of its transfer.

Invariant: a job ends in exactly one way, when the sender says that nothing reads its blocks any more (`_push_done`).
Cancels, deadlines and lost decode workers only make this happen sooner.
"""

import asyncio
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog

from baton_proto.decoding import MAX_TEXT
from baton_proto.worker import PREFILL, Failure, PrefillFailed, PrefillRequest
from engine.sequences.output import StepOutput
from kvtransfer.prefill_side.push import PushResult
from prefill_worker.prefill_stream import PrefillStreams, sequence_of
from prefill_worker.push_plan import PushPlan
from prefill_worker.shipping import Shipping, ShippingJob
from runtime.errors import UnavailableError
from runtime.grammar.matcher import Matcher
from runtime.streams.message_stream import MessageStream
from worker.requests.compiling import Compiling
from worker.requests.in_flight import InFlight
from worker.requests.peers import Peers
from worker.runtime import WorkerRuntime
from worker.stream_server import Handler

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class Prompt:
    """One accepted PrefillRequest."""

    request: PrefillRequest
    stream: MessageStream
    job: ShippingJob
    deadline: asyncio.TimerHandle | None = None
    failure: Failure | None = None  # why the prompt is being ended early; None while all is well
    silent: bool = False  # the decode worker asked for the end, or is gone

    @property
    def key(self) -> tuple[MessageStream, str]:
        return (self.stream, self.request.request_id)


class Prompts(Peers):
    """Event loop, where nothing else is said."""

    def __init__(self, runtime: WorkerRuntime, in_flight: InFlight[Any, Any]) -> None:
        """`in_flight`: of the worker. Raises UnavailableError."""
        self._runtime = runtime
        self._serial = itertools.count(1)
        self._in_flight = in_flight
        self._compiling: Compiling[MessageStream] = Compiling(runtime.matcher)
        self._by_job: dict[ShippingJob, Prompt] = {}
        self._streams = PrefillStreams(self.accept, self.cancel, self.decode_worker_gone)
        assembly, kv = runtime.assembly, runtime.assembly.kv
        if kv is None:
            problem = f"a worker with {assembly.name} sends no KV in a service that began with workers.prefill: 0"
            raise UnavailableError(problem)
        identity = assembly.identity(runtime.worker_id, runtime.incarnation)
        self._sender = kv.make_sender(identity, runtime.config.transfer, runtime.keys.cluster)
        self._shipping = Shipping(kv.engine, self._sender, self._push_done)

    def stream_handlers(self) -> dict[str, Handler]:
        return {PREFILL: self._streams.serve}

    # --- prompts ------------------------------------------------------------------------------------------------------

    def accept(self, stream: MessageStream, request: PrefillRequest) -> None:
        token_ids = np.frombuffer(request.token_ids, dtype="<u4").tolist()
        if problem := self._problem(stream, request, len(token_ids)):
            self._refuse(stream, request, problem)
            return
        if request.sampling.grammar is None or self._runtime.assembly.limits.masks:
            self._begin(stream, request, token_ids, None)
            return
        key = (stream, request.request_id)

        def compiled(matcher: Matcher) -> None:
            if problem := self._problem(stream, request, len(token_ids)):
                self._refuse(stream, request, problem)
            else:
                self._begin(stream, request, token_ids, matcher)

        self._compiling.start(
            key, request.sampling.grammar, compiled, lambda error: self._refuse(stream, request, str(error)[:MAX_TEXT])
        )

    def _refuse(self, stream: MessageStream, request: PrefillRequest, problem: str) -> None:
        failure = Failure("refused", problem, retryable=True, worker_id=self._runtime.worker_id)
        stream.send(PrefillFailed(request.request_id, failure))

    def _begin(
        self, stream: MessageStream, request: PrefillRequest, token_ids: list[int], matcher: Matcher | None
    ) -> None:
        layout = self._runtime.assembly.layout
        name = f"{request.request_id}@{stream.peer}/{next(self._serial)}"
        sequence = sequence_of(request, name, token_ids, pinned=True, matcher=matcher)
        grant = request.grant
        assert grant is not None, "_problem() has seen it"
        plan = PushPlan(len(token_ids), grant.skip_tokens, layout.block_size)
        prompt = Prompt(request, stream, ShippingJob(sequence, plan))
        timeout_s = min(request.timeout_s, grant.ttl_s)
        failure = Failure("deadline", f"the prompt was not shipped within {timeout_s:.1f} s", retryable=False)
        prompt.deadline = asyncio.get_running_loop().call_later(timeout_s, self._end_early, prompt, failure)
        self._in_flight.add(prompt.key, prompt)
        self._by_job[prompt.job] = prompt
        self._runtime.metrics.requests += 1
        self._runtime.bridge.post(lambda _: self._shipping.add(prompt.job, grant))

    def _problem(self, stream: MessageStream, request: PrefillRequest, num_tokens: int) -> str | None:
        """Why a prompt cannot be run here; None: it can."""
        layout, grant = self._runtime.assembly.layout, request.grant
        if self._runtime.draining:
            return f"the prefill worker is {self._runtime.state}"
        if problem := self._runtime.assembly.lacks(request.adapter):
            return problem
        if grant is None:
            return "the decode worker grants no blocks"
        key = (stream, request.request_id)
        if key in self._in_flight or key in self._compiling:
            return "the request is in flight already"
        if num_tokens > layout.num_blocks * layout.block_size:
            return f"{num_tokens} tokens do not fit the pool of {layout.num_blocks * layout.block_size}"
        blocks = -(-num_tokens // layout.block_size) - grant.skip_tokens // layout.block_size
        granted, skipped = len(grant.block_ids), grant.skip_tokens
        if skipped % layout.block_size or skipped >= num_tokens or granted != blocks:
            return f"the grant of {granted} blocks after {skipped} tokens does not fit the prompt"
        return None

    def cancel(self, stream: MessageStream, request_id: str) -> None:
        if self._compiling.cancel((stream, request_id)):
            return
        if prompt := self._in_flight.get((stream, request_id)):
            prompt.silent = True
            self._end_early(prompt, Failure("cancelled", "cancelled by the decode worker", retryable=False))

    def decode_worker_gone(self, stream: MessageStream) -> None:
        self._compiling.cancel_of(stream)
        for prompt in list(self._by_job.values()):
            if prompt.stream is stream:
                prompt.silent = True
                self._end_early(prompt, Failure("cancelled", "the decode worker is gone", retryable=False))

    def end_all(self, failure: Failure) -> None:
        for prompt in list(self._by_job.values()):
            self._end_early(prompt, failure)

    def _end_early(self, prompt: Prompt, failure: Failure) -> None:
        """Idempotent; the first reason counts."""
        if prompt.failure is None:
            prompt.failure = failure
            log.info("prompt ends early", request_id=prompt.request.request_id, reason=failure.message)
            self._runtime.bridge.post(lambda _: self._shipping.cancel(prompt.job, failure.message))

    # --- the end of a transfer ----------------------------------------------------------------------------------------

    def _push_done(self, job: ShippingJob, result: PushResult) -> None:
        """One of the sender's threads."""
        self._runtime.bridge.post(lambda _: self._shipping.close(job), lambda _: self._closed(job, result))

    def _closed(self, job: ShippingJob, result: PushResult) -> None:
        prompt = self._by_job.pop(job)
        self._in_flight.discard(prompt.key)
        if prompt.deadline is not None:
            prompt.deadline.cancel()
        metrics = self._runtime.metrics
        if result.ok:
            metrics.sent(result.transport, result.kv_bytes, result.seconds)
            return
        metrics.transfer_failures += 1
        metrics.failures += 1
        if not prompt.silent:
            reason = prompt.failure or Failure("internal", result.reason[:MAX_TEXT], retryable=True)
            failure = Failure(reason.code, reason.message, reason.retryable, worker_id=self._runtime.worker_id)
            prompt.stream.send(PrefillFailed(prompt.request.request_id, failure))

    # --- for the worker process ---------------------------------------------------------------------------------------

    def step_done(self, output: StepOutput) -> None:
        """Engine thread."""
        self._shipping.step_done(output)

    @property
    def num_prompts(self) -> int:
        return len(self._by_job)

    def end_streams(self) -> None:
        self._streams.close()

    async def suspend(self, timeout_s: float) -> None:
        await asyncio.to_thread(self._sender.let_go, timeout_s)

    def weights_changed(self) -> None:
        runtime = self._runtime
        self._sender.identify(runtime.assembly.identity(runtime.worker_id, runtime.incarnation))

    async def close(self) -> None:
        await asyncio.to_thread(self._sender.close)
