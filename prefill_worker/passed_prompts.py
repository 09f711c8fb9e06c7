"""Prompts of decode workers whose KV the engine's own connector gives away: each is computed here, and what the
connector says of it is sent back."""

import asyncio
import itertools
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from baton_proto.decoding import MAX_TEXT
from baton_proto.timeline import micros
from baton_proto.worker import PREFILL, Failure, PrefillFailed, PrefillPassed, PrefillRequest
from engine.sequences.output import SequenceOutput, StepOutput
from engine.sequences.sequence import Sequence
from prefill_worker.prefill_stream import PrefillStreams, sequence_of
from runtime.streams.message_stream import MessageStream
from worker.requests.in_flight import InFlight
from worker.requests.peers import Peers
from worker.runtime import WorkerRuntime
from worker.stamps import chunks_of
from worker.stream_server import Handler


@dataclass(slots=True, eq=False)
class Prompt:
    """One accepted PrefillRequest."""

    request_id: str  # the decode worker's name for it
    stream: MessageStream
    sequence: Sequence
    accepted_s: float = field(default_factory=time.monotonic)
    deadline: asyncio.TimerHandle | None = None

    @property
    def key(self) -> tuple[MessageStream, str]:
        return (self.stream, self.request_id)


class PassedPrompts(Peers):
    """Event loop, where nothing else is said."""

    def __init__(self, runtime: WorkerRuntime, in_flight: InFlight[Any, Any]) -> None:
        """`in_flight`: of the worker."""
        self._runtime = runtime
        self._in_flight = in_flight
        self._serial = itertools.count(1)
        self._by_name: dict[str, Prompt] = {}  # the sequence's
        self._streams = PrefillStreams(self.accept, self.cancel, self.decode_worker_gone)

    def stream_handlers(self) -> dict[str, Handler]:
        return {PREFILL: self._streams.serve}

    def accept(self, stream: MessageStream, request: PrefillRequest) -> None:
        token_ids = np.frombuffer(request.token_ids, dtype="<u4").tolist()
        if problem := self._problem(stream, request, len(token_ids)):
            self._refuse(stream, request.request_id, "refused", problem)
            return
        name = f"{request.request_id}@{stream.peer}/{next(self._serial)}"
        sequence = sequence_of(request, name, token_ids)
        prompt = Prompt(request.request_id, stream, sequence)
        problem = f"the prompt was not computed within {request.timeout_s:.1f} s"
        late = Failure("deadline", problem, retryable=False, worker_id=self._runtime.worker_id)
        prompt.deadline = asyncio.get_running_loop().call_later(request.timeout_s, self._end_early, prompt, late)
        self._in_flight.add(prompt.key, prompt)
        self._by_name[sequence.request_id] = prompt
        self._runtime.metrics.requests += 1
        self._runtime.bridge.post(lambda engine: engine.add(sequence))

    def _problem(self, stream: MessageStream, request: PrefillRequest, num_tokens: int) -> str:
        """Why a prompt cannot be run here; empty when it can."""
        limit = self._runtime.assembly.max_model_len
        if self._runtime.draining:
            return f"the prefill worker is {self._runtime.state}"
        if problem := self._runtime.assembly.lacks(request.adapter):
            return problem
        if request.grant is not None:
            return "it writes into nobody's blocks: the decode worker's engine is of another kind"
        if (stream, request.request_id) in self._in_flight:
            return "the request is in flight already"
        return f"{num_tokens} tokens and one more do not fit {limit}" if num_tokens >= limit else ""

    def cancel(self, stream: MessageStream, request_id: str) -> None:
        if (prompt := self._in_flight.get((stream, request_id))) is not None:
            self._end_early(prompt, None)

    def decode_worker_gone(self, stream: MessageStream) -> None:
        for prompt in list(self._by_name.values()):
            if prompt.stream is stream:
                self._end_early(prompt, None)

    def end_all(self, failure: Failure) -> None:
        for prompt in list(self._by_name.values()):
            self._end_early(prompt, failure)

    def step_done(self, output: StepOutput) -> None:
        """Engine thread."""
        ended = [one for one in output.outputs if one.finish and one.sequence.request_id in self._by_name]
        if ended:
            self._runtime.bridge.from_engine(self._computed, ended)

    def _computed(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            prompt = self._by_name.get(output.sequence.request_id)
            if prompt is None:  # it has ended early
                continue
            self._ended(prompt)
            if output.finish == "error":
                self._refuse(prompt.stream, prompt.request_id, "internal", output.error or "an engine step failed")
                continue
            sequence = output.sequence
            passed = PrefillPassed(
                prompt.request_id,
                sequence.transfer,
                sequence.prompt_counts,
                micros(time.monotonic() - prompt.accepted_s),
                chunks_of(sequence, prompt.accepted_s),
            )
            prompt.stream.send(passed)

    def _end_early(self, prompt: Prompt, failure: Failure | None) -> None:
        """`failure` None: the decode worker asked for the end, or is gone."""
        self._ended(prompt)
        self._runtime.bridge.post(lambda engine: engine.abort(prompt.sequence.request_id))
        if failure is not None:
            self._runtime.metrics.failures += 1
            prompt.stream.send(PrefillFailed(prompt.request_id, failure))

    def _ended(self, prompt: Prompt) -> None:
        del self._by_name[prompt.sequence.request_id]
        self._in_flight.discard(prompt.key)
        if prompt.deadline is not None:
            prompt.deadline.cancel()

    def _refuse(self, stream: MessageStream, request_id: str, code: str, problem: str) -> None:
        failure = Failure(code, problem[:MAX_TEXT], retryable=True, worker_id=self._runtime.worker_id)
        stream.send(PrefillFailed(request_id, failure))

    # --- for the worker process ---------------------------------------------------------------------------------------

    @property
    def num_prompts(self) -> int:
        return len(self._by_name)

    def end_streams(self) -> None:
        self._streams.close()
