"""What a prefill worker has to do with decode workers, however their KV goes: prompts and grants come in on their
streams, failures go out; success comes with the KV."""

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import numpy as np
import structlog

from baton_proto.decoding import MAX_TEXT, decoder
from baton_proto.worker import PREFILL, Failure, PrefillCancel, PrefillCommand, PrefillFailed, PrefillRequest
from engine.sequences.sequence import Sequence
from runtime.errors import BatonError
from runtime.grammar.matcher import Matcher
from runtime.streams.message_stream import MessageStream
from worker.requests.compiling import Compiling
from worker.requests.in_flight import InFlight
from worker.requests.peers import Peers
from worker.runtime import WorkerRuntime
from worker.stamps import due_at
from worker.stream_server import Handler

CANCELLED: Final = Failure("cancelled", "cancelled by the decode worker", retryable=False)
GONE: Final = Failure("cancelled", "the decode worker is gone", retryable=False)

decode_command = decoder(PrefillCommand)

log = structlog.get_logger()


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


P = TypeVar("P", bound=Prompt)


class AcceptingPeers(Peers, ABC, Generic[P]):
    """Event loop, where nothing else is said."""

    done: str  # what a prompt has to be in time

    def __init__(self, runtime: WorkerRuntime, in_flight: InFlight[Any, Any]) -> None:
        """`in_flight`: of the worker."""
        self._runtime = runtime
        self._in_flight = in_flight
        self._serial = itertools.count(1)
        self._compiling: Compiling[MessageStream] = Compiling(runtime.matcher)
        self._by_name: dict[str, P] = {}  # the sequence's
        self._open: set[MessageStream] = set()

    @abstractmethod
    def _misfit(self, request: PrefillRequest, num_tokens: int) -> str:
        """Why the prompt cannot be run with its grant; empty when it can."""

    @abstractmethod
    def _begin(self, stream: MessageStream, request: PrefillRequest, sequence: Sequence) -> None:
        """Accepts a prompt that nothing is wrong with."""

    @abstractmethod
    def _end_early(self, prompt: P, failure: Failure, *, silent: bool = False) -> None:
        """`silent`: the decode worker asked for the end, or is gone."""

    # --- a decode worker's stream -------------------------------------------------------------------------------------

    def stream_handlers(self) -> dict[str, Handler]:
        return {PREFILL: self._serve}

    async def _serve(self, stream: MessageStream, decode_worker: str) -> None:
        """Serves a stream from the hellos to its end."""
        self._open.add(stream)
        log.info("decode worker connected", decode_worker=decode_worker)
        try:
            stream.listen(decode_command, lambda command: self._obey(stream, command))
            reason = await stream.ended()
        finally:
            self._open.discard(stream)
            self._decode_worker_gone(stream)
        log.info("decode worker disconnected", decode_worker=decode_worker, reason=reason)

    def _obey(self, stream: MessageStream, command: PrefillRequest | PrefillCancel) -> None:
        if isinstance(command, PrefillRequest):
            self._accept(stream, command)
            return
        key = (stream, command.request_id)
        if not self._compiling.cancel(key) and (prompt := self._in_flight.get(key)):
            self._end_early(prompt, CANCELLED, silent=True)

    def _accept(self, stream: MessageStream, request: PrefillRequest) -> None:
        token_ids = np.frombuffer(request.token_ids, dtype="<u4").tolist()
        grammar = None if self._runtime.assembly.limits.masks else request.sampling.grammar

        def begin(matcher: Matcher | None = None) -> None:
            if problem := self._problem(stream, request, len(token_ids)):
                self._refuse(stream, request.request_id, problem)
            else:
                self._begin(stream, request, self._sequence(stream, request, token_ids, matcher))

        def failed(error: BatonError) -> None:
            self._refuse(stream, request.request_id, str(error))

        if grammar is None or self._problem(stream, request, len(token_ids)):
            begin()
        else:
            self._compiling.start((stream, request.request_id), grammar, begin, failed)

    def _problem(self, stream: MessageStream, request: PrefillRequest, num_tokens: int) -> str:
        """Why a prompt cannot be run here; empty when it can."""
        if self._runtime.draining:
            return f"the prefill worker is {self._runtime.state}"
        if problem := self._runtime.assembly.lacks(request.adapter):
            return problem
        key = (stream, request.request_id)
        if key in self._in_flight or key in self._compiling:
            return "the request is in flight already"
        return self._misfit(request, num_tokens)

    def _sequence(
        self, stream: MessageStream, request: PrefillRequest, token_ids: list[int], matcher: Matcher | None
    ) -> Sequence:
        return Sequence(
            f"{request.request_id}@{stream.peer}/{next(self._serial)}",
            token_ids,
            request.num_prompt_tokens,
            request.sampling,
            priority=request.priority,
            prefill_only=True,
            pinned=request.grant is not None,
            hash_seed=request.hash_seed,
            hint=request.hint,
            matcher=matcher,
            due_s=due_at(request.due_ms),
            adapter=request.adapter,
        )

    def _refuse(self, stream: MessageStream, request_id: str, problem: str, code: str = "refused") -> None:
        failure = Failure(code, problem[:MAX_TEXT], retryable=True, worker_id=self._runtime.worker_id)
        stream.send(PrefillFailed(request_id, failure))

    # --- accepted prompts ---------------------------------------------------------------------------------------------

    def _add(self, prompt: P, timeout_s: float) -> None:
        problem = f"the prompt was not {self.done} within {timeout_s:.1f} s"
        late = Failure("deadline", problem, retryable=False, worker_id=self._runtime.worker_id)
        prompt.deadline = asyncio.get_running_loop().call_later(timeout_s, self._end_early, prompt, late)
        self._in_flight.add(prompt.key, prompt)
        self._by_name[prompt.sequence.request_id] = prompt
        self._runtime.metrics.requests += 1

    def _forget(self, prompt: P) -> None:
        del self._by_name[prompt.sequence.request_id]
        self._in_flight.discard(prompt.key)
        if prompt.deadline is not None:
            prompt.deadline.cancel()

    def _decode_worker_gone(self, stream: MessageStream) -> None:
        self._compiling.cancel_of(stream)
        for prompt in list(self._by_name.values()):
            if prompt.stream is stream:
                self._end_early(prompt, GONE, silent=True)

    # --- for the worker process ---------------------------------------------------------------------------------------

    @property
    def num_prompts(self) -> int:
        return len(self._by_name)

    def end_all(self, failure: Failure) -> None:
        for prompt in list(self._by_name.values()):
            self._end_early(prompt, failure)

    def end_streams(self) -> None:
        """Ends the streams after pending messages have left."""
        for stream in self._open:
            stream.close()
