"""What a step computes, how long steps take, and what a few of them took, for router and planner."""

from math import inf

from baton_proto.discovery import TimedStep
from engine.sequences.batch import Batch
from runtime.config.step_fit import FittedSteps
from runtime.config.step_times import StepTimes, token_pairs

KEPT = 16  # from one `take` to the next
FIT_S = 1.0  # so often at most the times are fitted: a fit takes half a millisecond


def work_of(batch: Batch) -> TimedStep:
    """What the batch computes; how long that takes is not known yet."""
    tokens = sum([item.num_tokens for item in batch.prefill])
    drafted = sum([item.num_tokens for item in batch.drafted])  # each token of a draft counts as another sequence
    pairs = sum([token_pairs(item.start, item.num_tokens) for item in batch.prefill])
    context_tokens = sum([item.end for item in batch.drafted]) + sum([item.end for item in batch.decode])
    return TimedStep(tokens, pairs, drafted + len(batch.decode), context_tokens, 0.0)


class TimedSteps:
    """Engine thread only."""

    def __init__(self, profile: StepTimes) -> None:
        """`profile`: what steps are expected to take until enough were timed."""
        self._fitted = FittedSteps(profile)
        self._fitted_s = 0.0
        self._steps: list[TimedStep] = []
        self._last_ms = 0.0

    def add(self, step: TimedStep, now_s: float) -> None:
        self._last_ms = step.step_ms
        self._fitted.add(step)
        if not 0.0 <= now_s - self._fitted_s < FIT_S and self._fitted.refit():
            self._fitted_s = now_s
        if len(self._steps) < KEPT:
            self._steps.append(step)

    @property
    def times(self) -> StepTimes:
        return self._fitted.times

    @property
    def knows_prompts(self) -> bool:
        """Whether `times` follow from steps with prompts."""
        return self._fitted.seen[0]

    def expected_ms(self, step: TimedStep) -> float:
        """How long such a step takes, about."""
        return self.times.step_ms(step.prompt_tokens, step.prompt_pairs, step.sequences, step.context_tokens)

    def prompt_s(self, num_tokens: int) -> float:
        """How long so many prompt tokens take, about, without their attention; infinite while nobody knows."""
        return num_tokens * self.times.prefill_token_ms / 1e3 if self.knows_prompts else inf

    def last_s(self) -> float:
        """How long the last step took."""
        return self._last_ms / 1e3

    def take(self) -> list[TimedStep]:
        """Returns the steps that were kept since the last call."""
        steps, self._steps = self._steps, []
        return steps
