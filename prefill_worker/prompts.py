"""Prompts of decode workers: each is accepted, and seen through to the end of its transfer.

Invariant: a job ends in exactly one way, when the sender says that nothing reads its blocks any more (`_push_done`).
Cancels, deadlines and lost decode workers only make this happen sooner.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import structlog
from msgspec.structs import replace

from baton_proto.decoding import MAX_TEXT
from baton_proto.worker import Failure, PrefillFailed, PrefillRequest
from engine.sequences.output import StepOutput
from engine.sequences.sequence import Sequence
from kvtransfer.prefill_side.push import PushResult
from prefill_worker.accepting import AcceptingPeers, Prompt
from prefill_worker.push_plan import PushPlan
from prefill_worker.shipping import Shipping, ShippingJob
from runtime.errors import UnavailableError
from runtime.streams.message_stream import MessageStream
from worker.requests.in_flight import InFlight
from worker.runtime import WorkerRuntime

log = structlog.get_logger()


@dataclass(slots=True, eq=False, kw_only=True)
class ShippedPrompt(Prompt):
    job: ShippingJob
    failure: Failure | None = None  # why the prompt is being ended early; None while all is well
    silent: bool = False  # the decode worker asked for the end, or is gone


class Prompts(AcceptingPeers[ShippedPrompt]):
    done = "shipped"

    def __init__(self, runtime: WorkerRuntime, in_flight: InFlight[Any, Any]) -> None:
        """Raises UnavailableError."""
        super().__init__(runtime, in_flight)
        assembly, kv = runtime.assembly, runtime.assembly.kv
        if kv is None:
            problem = f"a worker with {assembly.name} sends no KV in a service that began with workers.prefill: 0"
            raise UnavailableError(problem)
        identity = assembly.identity(runtime.worker_id, runtime.incarnation)
        self._sender = kv.make_sender(identity, runtime.config.transfer, runtime.keys.cluster)
        self._shipping = Shipping(kv.engine, self._sender, self._push_done, assembly.layout.num_blocks)

    def _misfit(self, request: PrefillRequest, num_tokens: int) -> str:
        layout, grant = self._runtime.assembly.layout, request.grant
        if grant is None:
            return "the decode worker grants no blocks"
        if num_tokens > layout.num_blocks * layout.block_size:
            return f"{num_tokens} tokens do not fit the pool of {layout.num_blocks * layout.block_size}"
        blocks = -(-num_tokens // layout.block_size) - grant.skip_tokens // layout.block_size
        granted, skipped, sliding = grant.num_blocks, grant.skip_tokens, grant.num_window_blocks
        misfit = sliding > granted or bool(sliding) != bool(layout.window_layers)
        if skipped % layout.block_size or skipped >= num_tokens or granted != blocks or misfit:
            return f"the grant of {granted} blocks after {skipped} tokens does not fit the prompt"
        return ""

    def _begin(self, stream: MessageStream, request: PrefillRequest, sequence: Sequence) -> None:
        grant = request.grant
        assert grant is not None, "_misfit() has seen it"
        block_size = self._runtime.assembly.layout.block_size
        plan = PushPlan(sequence.num_tokens, grant.skip_tokens, block_size, grant.num_window_blocks)
        job = ShippingJob(sequence, plan)
        self._add(ShippedPrompt(request.request_id, stream, sequence, job=job), min(request.timeout_s, grant.ttl_s))
        self._runtime.bridge.post(lambda _: self._shipping.add(job, grant))

    def _end_early(self, prompt: ShippedPrompt, failure: Failure, *, silent: bool = False) -> None:
        """Idempotent; the first reason counts."""
        prompt.silent |= silent
        if prompt.failure is None:
            prompt.failure = failure
            log.info("prompt ends early", request_id=prompt.request_id, reason=failure.message)
            self._runtime.bridge.post(lambda _: self._shipping.cancel(prompt.job, failure.message))

    # --- the end of a transfer ----------------------------------------------------------------------------------------

    def _push_done(self, job: ShippingJob, result: PushResult) -> None:
        """One of the sender's threads."""
        self._runtime.bridge.post(lambda _: self._shipping.close(job), lambda _: self._closed(job, result))

    def _closed(self, job: ShippingJob, result: PushResult) -> None:
        prompt = self._by_name[job.sequence.request_id]
        self._forget(prompt)
        metrics = self._runtime.metrics
        if result.ok:
            metrics.sent(result.transport, result.kv_bytes, result.seconds)
            return
        metrics.transfer_failures += 1
        metrics.failures += 1
        if not prompt.silent:
            reason = prompt.failure or Failure("internal", result.reason[:MAX_TEXT], retryable=True)
            failure = replace(reason, worker_id=self._runtime.worker_id)
            prompt.stream.send(PrefillFailed(prompt.request_id, failure))

    # --- for the worker process ---------------------------------------------------------------------------------------

    def step_done(self, output: StepOutput) -> None:
        """Engine thread."""
        self._shipping.step_done(output)

    async def suspend(self, timeout_s: float) -> None:
        await asyncio.to_thread(self._sender.let_go, timeout_s)

    def weights_changed(self) -> None:
        runtime = self._runtime
        self._sender.identify(runtime.assembly.identity(runtime.worker_id, runtime.incarnation))

    async def close(self) -> None:
        await asyncio.to_thread(self._sender.close)
