"""Outputs of quick engine steps on their way to the event loop, several as one. Engine thread only.

Because both threads share Python's lock, an event loop that wakes at each step of 2 ms holds the engine up. Nothing
waits that a client waits for: a request's first and last tokens, errors, what a step with prompts brings.
"""

import time
from collections.abc import Callable

from engine.sequences.output import SequenceOutput, StepOutput
from engine.sequences.sequence import Sequence

# News leave at most so often, those of quicker steps together. 20 ms would halve the messages of an engine that takes
# no time, and a reader would see the text come in jerks.
GATHER_S = 0.01
MANY = 60  # requests with fewer are gathered for less, but LEAST of it: steps of 6 ms of three readers left in pairs
LEAST = 0.4
PER_REQUEST_S = 60e-6  # a request's news cost a worker some 5 us, and a router 30 to 70


def gather_s(configured_s: float, num_requests: int) -> float:
    """How long the tokens of so many requests are gathered. The more requests, the longer, because a request's news
    cost the same however many tokens they hold. 0: not at all."""
    return configured_s and max(configured_s * min(1.0, max(LEAST, num_requests / MANY)), num_requests * PER_REQUEST_S)


class GatheredSteps:
    def __init__(self, configured_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Tokens wait no longer than `gather_s`, but for the part of a step by which that is nearer to a step's end, if
        the next step is as long as the last one."""
        self._configured_s = configured_s
        self._clock = clock
        self._held: StepOutput | None = None
        self._by_sequence: dict[Sequence, SequenceOutput] = {}  # of `_held`, all of them
        self._step_began_s = self._due_s = 0.0

    def add(self, output: StepOutput) -> StepOutput | None:
        """Returns what leaves now, in the order in which it came; None while it may wait for the next step."""
        now_s = self._clock()
        step_s, self._step_began_s = now_s - self._step_began_s, now_s
        is_due = now_s + step_s / 2 >= self._due_s
        if is_due:
            self._due_s = now_s + gather_s(self._configured_s, len(output.outputs))
        if is_due or not output.may_wait:
            return self._joined(output)
        self._hold(output)
        return None

    def take(self) -> StepOutput | None:
        """Returns what waits, because something that came later leaves now."""
        taken, self._held = self._held, None
        self._by_sequence = {}
        return taken

    def _joined(self, output: StepOutput) -> StepOutput:
        held = self.take()
        if held is None:
            return output
        return _added(held, output, held.outputs + output.outputs)

    def _hold(self, output: StepOutput) -> None:
        held = self._held or StepOutput([], [])
        self._held = _added(held, output, held.outputs)
        outputs, known = held.outputs, self._by_sequence
        for one in output.outputs:
            earlier = known.setdefault(one.sequence, one)
            if earlier is one:
                outputs.append(one)
            else:
                earlier.token_ids.extend(one.token_ids)
                earlier.logprobs.extend(one.logprobs)


def _added(held: StepOutput, output: StepOutput, outputs: list[SequenceOutput]) -> StepOutput:
    """Both, with these outputs."""
    return StepOutput(
        outputs,
        held.events + output.events,
        held.num_tokens + output.num_tokens,
        held.restored or output.restored,
        step_ms=held.step_ms + output.step_ms,
    )
