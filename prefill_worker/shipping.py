"""The engine thread's side of the prefill role: runs prompts and hands their KV blocks to the sender.

Shipping owns every job from add() until nothing reads its blocks any more. All methods run on the engine thread.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from baton_proto.sampling import TokenLogprobs
from baton_proto.timeline import micros
from baton_proto.worker import MAJOR, FirstToken, Grant, encode
from engine.interface import KvEngine
from engine.sequences.batch import Batch, LayerDone
from engine.sequences.output import SequenceOutput, StepOutput
from engine.sequences.sequence import Sequence, SequenceStatus
from kvtransfer.prefill_side.push import PushResult
from kvtransfer.prefill_side.sending import KvPush, KvSender, Piece
from prefill_worker.push_plan import PushPlan
from runtime.errors import BatonError
from worker.stamps import chunks_of

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class ShippingJob:
    """A prompt on its way to a decode worker."""

    sequence: Sequence
    plan: PushPlan
    push: KvPush | None = None
    accepted_s: float = field(default_factory=time.monotonic)


class Shipping:
    """`on_done` is called once per job, on any thread, when its source blocks may be reused; close() must follow."""

    def __init__(
        self,
        engine: KvEngine,
        sender: KvSender,
        on_done: Callable[[ShippingJob, PushResult], None],
        first_window_block: int = 0,
    ) -> None:
        """first_window_block: the slab's id of the first block of layers with a window."""
        self._first_window_block = first_window_block
        self._engine = engine
        self._sender = sender
        self._on_done = on_done
        self._jobs: dict[str, ShippingJob] = {}
        engine.on_batch = self._batch_begins

    def add(self, job: ShippingJob, grant: Grant) -> None:
        """Begins a job; `on_done` will follow."""
        self._jobs[job.sequence.request_id] = job
        self._engine.add(job.sequence)
        try:
            job.push = self._sender.begin(grant, lambda result: self._on_done(job, result))
        except BatonError as error:
            self._on_done(job, PushResult(False, str(error), "", 0, 0, 0.0))

    def cancel(self, job: ShippingJob, reason: str) -> None:
        """Ends a job early. Its blocks stay pinned until `on_done`."""
        if job.sequence.request_id in self._jobs:
            self._engine.abort(job.sequence.request_id)
            if job.push is not None:
                job.push.abort(reason)

    def close(self, job: ShippingJob) -> None:
        """The one release of a job's blocks, however the job ended."""
        del self._jobs[job.sequence.request_id]
        if job.sequence.status is not SequenceStatus.FINISHED:  # the push broke while the prompt was running
            self._engine.abort(job.sequence.request_id)
        self._engine.unpin(job.sequence)

    def step_done(self, output: StepOutput) -> None:
        for sequence_output in output.outputs:
            job = self._jobs.get(sequence_output.sequence.request_id)
            if job is None or job.push is None:
                continue
            if sequence_output.finish == "prefill":
                job.push.commit(encode(_first_token(job, job.push, sequence_output)))
            else:
                job.push.abort(sequence_output.error or f"the prompt ended with {sequence_output.finish!r}")

    def _batch_begins(self, batch: Batch) -> LayerDone | None:
        pieces = []
        for item in batch.items:  # a chunk of one token may count as a decode
            job = self._jobs.get(item.sequence.request_id)
            if job is None or job.push is None:
                continue
            plan = job.plan
            if chunk := plan.advance(item.end):
                source = tuple(item.sequence.block_table[chunk.start : chunk.stop])
                pieces.append(Piece(job.push, plan.grant_index(chunk.start), source, plan.tail(item.end)))
                if window := plan.in_window(chunk):
                    places = item.sequence.window_table[window.start : window.stop]
                    source = tuple(self._first_window_block + place for place in places)
                    pieces.append(Piece(job.push, plan.window_index(window.start), source, plan.tail(item.end)))
        return self._sender.ship(pieces) if pieces else None


def _first_token(job: ShippingJob, push: KvPush, output: SequenceOutput) -> FirstToken:
    logprobs: TokenLogprobs | None = output.logprobs[0] if output.logprobs else None
    return FirstToken(
        version=MAJOR,
        token_id=output.token_ids[0],
        logprobs=logprobs,
        prompt_counts=output.sequence.prompt_counts,
        begun_us=micros(push.started_s - job.accepted_s),
        chunks=chunks_of(output.sequence, job.accepted_s),
        prompt_logprobs=output.prompt_logprobs,
    )
