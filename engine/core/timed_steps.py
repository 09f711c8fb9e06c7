"""What a step computes, and how long a few of them took: the planner fits its step model to these. How long a prompt
takes, about: restoring it from the disk has to be sooner."""

from math import inf

from baton_proto.discovery import TimedStep
from engine.sequences.batch import Batch
from runtime.config.step_times import token_pairs

KEPT = 16  # from one `take` to the next
DECAY = 0.9  # of what prompts took, with each step
PAIR_TOKENS = 6e-5  # what attention to one token costs, as part of computing one: of an 8B model, see StepTimes


def timed_step(batch: Batch, step_ms: float) -> TimedStep:
    """What the batch computes, and how long that took."""
    tokens, pairs = prompt_work_of(batch)
    return TimedStep(tokens, pairs, len(batch.decode), sum([item.end for item in batch.decode]), step_ms)


def prompt_work_of(batch: Batch) -> tuple[int, float]:
    """Prompt tokens and their pairs."""
    tokens = sum([item.num_tokens for item in batch.prefill])
    return tokens, sum([token_pairs(item.start, item.num_tokens) for item in batch.prefill])


class TimedSteps:
    """Engine thread only."""

    def __init__(self) -> None:
        self._steps: list[TimedStep] = []
        # Of steps that were mostly prompts, the last ones above all.
        self._prompt_tokens = self._prompt_pairs = self._prompt_ms = 0.0
        self._last_ms = 0.0

    def add(self, batch: Batch, step_ms: float) -> None:
        tokens, pairs = prompt_work_of(batch)
        self.note(tokens, pairs, len(batch.decode), step_ms)
        if len(self._steps) < KEPT:
            self._steps.append(timed_step(batch, step_ms))

    def note(self, num_tokens: int, num_pairs: float, num_decodes: int, step_ms: float) -> None:
        """Takes the time of a step."""
        self._last_ms = step_ms
        if num_tokens > num_decodes:
            self._prompt_tokens = DECAY * self._prompt_tokens + num_tokens
            self._prompt_pairs = DECAY * self._prompt_pairs + num_pairs
            self._prompt_ms = DECAY * self._prompt_ms + step_ms

    def prompt_s(self, num_tokens: int) -> float:
        """How long so many prompt tokens take, about; infinite while nobody knows."""
        return num_tokens * self._prompt_ms / self._prompt_tokens / 1e3 if self._prompt_tokens else inf

    def attentive_s(self, num_tokens: int, num_pairs: float) -> float:
        """Like prompt_s(), with the attention of just these tokens."""
        if not self._prompt_tokens:
            return inf
        work = self._prompt_tokens + PAIR_TOKENS * self._prompt_pairs
        return (num_tokens + PAIR_TOKENS * num_pairs) * self._prompt_ms / work / 1e3

    def last_s(self) -> float:
        """How long the last step took."""
        return self._last_ms / 1e3

    def take(self) -> list[TimedStep]:
        """Returns the steps that were kept since the last call."""
        steps, self._steps = self._steps, []
        return steps
