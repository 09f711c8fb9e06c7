"""What a step computes, and how long a few of them took: the planner fits its step model to these. How long a prompt
takes, about: restoring it from the disk has to be sooner."""

from math import inf

from baton_proto.discovery import TimedStep
from engine.core.batch import Batch
from runtime.config.step_times import token_pairs

KEPT = 16  # from one `take` to the next
DECAY = 0.9  # of what prompts took, with each step


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
        self._prompt_tokens = self._prompt_ms = 0.0  # of steps that were mostly prompts, the last ones above all
        self._last_ms = 0.0

    def add(self, batch: Batch, step_ms: float) -> None:
        self._last_ms = step_ms
        num_tokens = batch.num_tokens - len(batch.decode)
        if num_tokens > len(batch.decode):
            self._prompt_tokens = DECAY * self._prompt_tokens + num_tokens
            self._prompt_ms = DECAY * self._prompt_ms + step_ms
        if len(self._steps) < KEPT:
            self._steps.append(TimedStep(*work_of(batch), step_ms))

    def prompt_s(self, num_tokens: int) -> float:
        """How long so many prompt tokens take, about; infinite while nobody knows."""
        return num_tokens * self._prompt_ms / self._prompt_tokens / 1e3 if self._prompt_tokens else inf

    def last_s(self) -> float:
        """How long the last step took."""
        return self._last_ms / 1e3

    def take(self) -> list[TimedStep]:
        """Those that were kept since the last call."""
        steps, self._steps = self._steps, []
        return steps
