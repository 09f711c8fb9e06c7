"""How prompts share a step, by the rule of runtime/step_rule.py.

A prompt whose next tokens an earlier one computes right now waits until they are cached. Each token is then computed
once, however many prompts with the same beginning come at the same time.
"""

from math import inf
from typing import Final, NamedTuple

from runtime.config.planner import TargetsConfig
from runtime.config.step_times import USUAL, StepTimes, token_pairs
from runtime.step_rule import prompt_ms, rank, tokens_within

MUCH_SHORTER: Final = 2
LEAST_LED: Final = 128  # tokens that a prompt waits for; fewer take no longer than a step takes anyway
LEAST_TOKENS: Final = 16  # of a step's first prompt, however slow the device is
BLIND_TOKENS: Final = 512  # of a step while nobody knows how long its prompts take


def follows(left: int, led: int, leader_left: int, step_tokens: float) -> bool:
    """Whether a prompt waits until an earlier one has computed tokens for both of them.

    left: tokens that the prompt would compute now, `led` of them in common with the other one, whose own are
    `leader_left`; step_tokens: of a usual step. A much shorter prompt does not wait, because it goes before its leader.
    """
    return led > min(LEAST_LED, step_tokens // 4) and left * MUCH_SHORTER > leader_left


class Prompt(NamedTuple):
    """What is left of a prompt: `left` tokens behind `start` computed ones."""

    start: int
    left: int
    due_ms: float  # until its first token is due, from now on; infinite: at no time


class StepBudget:
    """What prompts may take of a worker's steps. The engine thread owns it."""

    def __init__(self, targets: TargetsConfig) -> None:
        self.times: StepTimes = USUAL
        self.is_blind = False  # whether `times` are not this worker's own yet
        self.targets = targets

    @property
    def step_tokens(self) -> float:
        """How many prompt tokens take as long as readers may wait for a token."""
        return self.targets.itl_ms / max(1e-9, self.times.prefill_token_ms)

    def work_ms(self, prompt: Prompt) -> float:
        times = self.times
        pairs = token_pairs(prompt.start, prompt.left)
        return times.prefill_token_ms * prompt.left + times.prefill_pair_ms * pairs

    def rank(self, work_ms: float, due_ms: float) -> float:
        """The lowest goes first. A prompt that is due sooner counts as if it had come earlier. work_ms: what is left of
        it; due_ms: as in Prompt."""
        return rank(work_ms, self.targets.ttft_ms - due_ms if due_ms < inf else 0.0)

    def prompt_ms(self, num_readers: int, context_tokens: int, queue_ms: float) -> float:
        """What prompts may take of the next step beside the readers. queue_ms: work of all prompts."""
        times = self.times
        readers_ms = times.beside_ms(num_readers, context_tokens)
        floors = times.prefill_floor_ms, times.decode_floor_ms
        return prompt_ms(*floors, readers_ms, num_readers, queue_ms, self.targets.itl_ms, self.targets.ttft_ms)

    def tokens(self, budget_ms: float, prompt: Prompt) -> int:
        """How many of the prompt's tokens take at most `budget_ms`."""
        times = self.times
        return tokens_within(budget_ms, times.prefill_token_ms, times.prefill_pair_ms, prompt.start, prompt.left)
