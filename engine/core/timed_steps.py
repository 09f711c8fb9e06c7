"""What a step computes, and how long a few of them took: the planner fits its step model to these."""

from baton_proto.discovery import TimedStep
from engine.core.batch import Batch
from runtime.config.step_times import token_pairs

KEPT = 4  # from one `take` to the next


def work_of(batch: Batch) -> tuple[int, float, int, int]:
    """A TimedStep without its time: prompt tokens, their pairs, sequences that decode, tokens of their context."""
    return (
        sum(item.num_tokens for item in batch.prefill),
        sum(token_pairs(item.start, item.num_tokens) for item in batch.prefill),
        len(batch.decode),
        sum(item.end for item in batch.decode),
    )


class TimedSteps:
    """Engine thread only."""

    def __init__(self) -> None:
        self._steps: list[TimedStep] = []

    def add(self, batch: Batch, step_ms: float) -> None:
        if len(self._steps) < KEPT:
            self._steps.append(TimedStep(*work_of(batch), step_ms))

    def take(self) -> list[TimedStep]:
        """Those that were kept since the last call."""
        steps, self._steps = self._steps, []
        return steps
