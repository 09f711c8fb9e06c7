"""Prompts of decode workers whose KV the engine's own connector gives away: each is computed here, and what the
connector says of it is sent back."""

import time

from baton_proto.timeline import micros
from baton_proto.worker import Failure, PrefillFailed, PrefillPassed, PrefillRequest
from engine.sequences.output import SequenceOutput, StepOutput
from engine.sequences.sequence import Sequence
from prefill_worker.accepting import AcceptingPeers, Prompt
from runtime.streams.message_stream import MessageStream
from worker.stamps import chunks_of


class PassedPrompts(AcceptingPeers[Prompt]):
    done = "computed"

    def _misfit(self, request: PrefillRequest, num_tokens: int) -> str:
        limit = self._runtime.assembly.max_model_len
        if request.grant is not None:
            return "it writes into nobody's blocks: the decode worker's engine is of another kind"
        return f"{num_tokens} tokens and one more do not fit {limit}" if num_tokens >= limit else ""

    def _begin(self, stream: MessageStream, request: PrefillRequest, sequence: Sequence) -> None:
        self._add(Prompt(request.request_id, stream, sequence), request.timeout_s)
        self._runtime.bridge.post(lambda engine: engine.add(sequence))

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
            self._forget(prompt)
            if output.finish == "error":
                problem = output.error or "an engine step failed"
                self._refuse(prompt.stream, prompt.request_id, problem, code="internal")
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

    def _end_early(self, prompt: Prompt, failure: Failure, *, silent: bool = False) -> None:
        self._forget(prompt)
        self._runtime.bridge.post(lambda engine: engine.abort(prompt.sequence.request_id))
        if not silent:
            self._runtime.metrics.failures += 1
            prompt.stream.send(PrefillFailed(prompt.request_id, failure))
