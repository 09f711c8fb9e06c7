"""How long vLLM's steps take, and what they compute: the planner fits its step model to these."""

from typing import Any

from baton_proto.discovery import TimedStep
from engine.core.timed_steps import KEPT


class VllmSteps:
    def __init__(self) -> None:
        self.num_steps = 0
        self.last_ms = 0.0
        self._steps: list[TimedStep] = []

    def add(self, stats: Any, timestamp_s: float, context_tokens: int) -> None:
        """stats: a SchedulerStats of vLLM's, with the details of the step where this version has them. A chunk's place
        in its prompt is not told, so that its pairs are those of a prompt's beginning."""
        details = getattr(stats, "iteration_details", None)
        if details is None or details.is_dummy:
            return
        pairs = details.num_ctx_tokens**2 / max(1, details.num_ctx_requests) / 2
        decoding = details.num_generation_requests
        context_tokens = context_tokens if decoding else 0
        self.keep(TimedStep(details.num_ctx_tokens, pairs, decoding, context_tokens, details.elapsed_ms))

    def keep(self, step: TimedStep) -> None:
        self.num_steps += 1
        self.last_ms = step.step_ms
        if len(self._steps) < KEPT:
            self._steps.append(step)

    def take(self) -> list[TimedStep]:
        """Returns the steps that were kept since the last call."""
        steps, self._steps = self._steps, []
        return steps
