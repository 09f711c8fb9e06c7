"""How much of a step belongs to prompts, and which prompts go first: one rule for engine, router and simulator.

Each running answer gets one token a step, so nobody's next token comes before the step's end. Steps are as long as
readers can bear: the target of the time between tokens (planner.targets.itl_ms). While prompts would miss their target,
a step may take longer, as long as earlier ones were shorter: what they saved is at hand, and the mean keeps the target.
Prompts always get half of a step, and the tokens that cost nothing because the weights are read anyway. Without
readers, a step is long enough that its fixed part is a small one.

The prompt with the least work left goes first, and each grows younger in this order while it waits. Hence a prompt
waits behind later ones for at most its own time divided by AGING.

All functions are of plain numbers, because numba compiles them, too. Times are in ms.
"""

from math import sqrt
from typing import Final

AGING: Final = 0.3  # ms of work that a ms of waiting counts as
LONGER: Final = 0.8  # of the target, that a step may take beyond it
AT_HAND: Final = 16.0  # targets that readers save up at most
HURRY: Final = 2.0  # a prompt is in danger when it would be late if all took so many times as long
ALONE: Final = 2.0  # targets that a step without readers may last
FLOORS: Final = 8.0  # or so many times what the smallest step takes


def rank(work_ms: float, waited_ms: float) -> float:
    """The prompt with the lowest one goes first. `work_ms`: of what is left of it."""
    return work_ms - AGING * waited_ms


def in_danger(work_ms: float, due_ms: float) -> bool:
    """`work_ms`: of a prompt and of those that go before it. `due_ms`: until its first token is due; below 0: it is
    late."""
    return HURRY * work_ms > due_ms


def prompt_ms(
    floor_ms: float, decode_floor_ms: float, readers_ms: float, target_ms: float, at_hand_ms: float, danger: bool
) -> float:
    """What prompts may take of a step. `floor_ms` and `decode_floor_ms`: of the smallest steps with prompts and with
    answers. `readers_ms`: of all running answers, without the floor; 0: there are none. `danger`: see in_danger."""
    if readers_ms <= 0.0:
        return max(ALONE * target_ms, FLOORS * floor_ms)
    step_ms = target_ms
    if danger:
        step_ms += min(at_hand_ms, LONGER * target_ms)
    return max(floor_ms, step_ms - readers_ms, 2 * decode_floor_ms + readers_ms)


def at_hand_after(at_hand_ms: float, step_ms: float, target_ms: float) -> float:
    """What readers have saved up, after a step."""
    return max(0.0, min(AT_HAND * target_ms, at_hand_ms + target_ms - step_ms))


def tokens_within(budget_ms: float, token_ms: float, pair_ms: float, start: int, left: int) -> int:
    """How many of a prompt's `left` tokens behind `start` computed ones take at most `budget_ms`."""
    linear_ms = token_ms + pair_ms * start
    if linear_ms * left + pair_ms * left * left / 2 <= budget_ms:
        return left
    if budget_ms <= 0.0:
        return 0
    # the root of pair / 2 * n^2 + linear * n = budget, in the form that is exact for few pairs
    return int(2 * budget_ms / (linear_ms + sqrt(linear_ms * linear_ms + 2 * pair_ms * budget_ms)))
