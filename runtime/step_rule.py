"""How much of a step belongs to prompts, and which prompts go first: one rule for engine, router and simulator.

Each running answer gets one token a step, so nobody's next token comes before the step's end. Steps beside answers last
as long as readers can bear: the target of the time between tokens (`ServingConfig.step_targets`). Two things make them
longer. Where few read, they are far ahead of that pace, and one long step is in fewer readers' way than several short
ones. Where the prompts' work is more than LATE of the target of first tokens (planner.targets.ttft_ms), steps get
longer in proportion, and prompts get most of them, because the readers' part of a long step is the smaller one: who
begins and who reads miss their targets alike. Prompts always get half of a step, and the tokens that cost nothing
because the weights are read anyway. Without readers, a step is long enough that its fixed part is a small one.

The prompt with the least work left goes first, and each comes forward while it waits: of the later ones only those go
before it that come within its own time divided by AGING.

All functions are of plain numbers, because numba compiles them, too. Times are in ms.
"""

from math import sqrt
from typing import Final

AGING: Final = 0.6  # ms of work that a ms of waiting counts as
LATE: Final = 0.6  # of the target of first tokens, that the prompts' work takes when steps get longer
FEW: Final = 4  # answers; beside n of fewer, steps last FEW / n targets
LONGEST: Final = 8.0  # targets that a step beside readers may last, unless the answers alone take more than their part
HALF, MOST = 2, 7  # steps of the answers alone that a step lasts at least, if prompts are in time or late
TILE: Final = 128  # rows of a matrix product's tile on a GPU; graphs of 512 rows and more are so far apart
ALONE: Final = 2.0  # targets that a step without readers may last
FLOORS: Final = 8.0  # or so many times what the smallest step takes


def rank(work_ms: float, waited_ms: float) -> float:
    """The prompt with the lowest one goes first. `work_ms`: of what is left of it."""
    return work_ms - AGING * waited_ms


def prompt_ms(
    floor_ms: float,
    decode_floor_ms: float,
    readers_ms: float,
    num_readers: int,
    queue_ms: float,
    itl_ms: float,
    ttft_ms: float,
) -> float:
    """What prompts may take of a step. `floor_ms` and `decode_floor_ms`: of the smallest steps with prompts and with
    answers. `readers_ms`: of all running answers, without the floor. `queue_ms`: work of all prompts that wait or run.
    `itl_ms` and `ttft_ms`: the targets."""
    if num_readers == 0:
        return max(ALONE * itl_ms, FLOORS * floor_ms)
    late = queue_ms / (LATE * ttft_ms)
    step_ms = itl_ms * min(LONGEST, max(1.0, FEW / num_readers, late))
    least_ms = (HALF if late <= 1.0 else MOST) * (decode_floor_ms + readers_ms)
    return max(floor_ms, step_ms - readers_ms, least_ms - readers_ms)


def tokens_within(budget_ms: float, token_ms: float, pair_ms: float, start: int, left: int) -> int:
    """How many of a prompt's `left` tokens behind `start` computed ones take at most `budget_ms`."""
    linear_ms = token_ms + pair_ms * start
    if linear_ms * left + pair_ms * left * left / 2 <= budget_ms:
        return left
    if budget_ms <= 0.0:
        return 0
    # the root of pair / 2 * n^2 + linear * n = budget, in the form that is exact for few pairs
    return int(2 * budget_ms / (linear_ms + sqrt(linear_ms * linear_ms + 2 * pair_ms * budget_ms)))


def in_tiles(before: int, num_tokens: int) -> int:
    """Tokens of a chunk that ends in mid-prompt, behind a step's other `before` rows: at most `num_tokens`, with which
    a step of many rows ends at a tile's end. The rest of a tile would cost time all the same."""
    beyond = (before + num_tokens) % TILE if before + num_tokens > 4 * TILE else 0
    return num_tokens - beyond if beyond < num_tokens else num_tokens
