"""A few steps with what they did and how long they took: what the planner fits its step model to.

The engine adds each step; only the first ones after `take` are kept, so that the others cost nothing.
"""

from baton_proto.discovery import TimedStep
from engine.core.batch import Batch

KEPT = 4  # from one `take` to the next


class TimedSteps:
    """Engine thread only."""

    def __init__(self) -> None:
        self._steps: list[TimedStep] = []

    def add(self, batch: Batch, step_ms: float) -> None:
        if len(self._steps) < KEPT:
            self._steps.append(
                TimedStep(
                    prompt_tokens=sum(item.num_tokens for item in batch.prefill),
                    prompt_pairs=sum(item.num_tokens * (item.start + item.num_tokens / 2) for item in batch.prefill),
                    sequences=len(batch.decode),
                    context_tokens=sum(item.end for item in batch.decode),
                    step_ms=step_ms,
                )
            )

    def take(self) -> list[TimedStep]:
        """Those that were kept since the last call."""
        steps, self._steps = self._steps, []
        return steps
