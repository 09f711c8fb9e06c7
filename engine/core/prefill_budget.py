"""How prompts share the tokens that a step may compute.

In order of arrival alone, a question of a hundred tokens would wait for a whole book that came before it. Therefore
only a quarter of a step belongs to the first prompt by right, and the rest goes to the prompts with the fewest tokens
left. A long prompt takes at most four times as long, and only while shorter ones arrive.

A prompt whose next tokens an earlier one computes right now waits until they are cached. Each token is then computed
once, however many prompts with the same beginning come at the same time.
"""

from collections.abc import Sequence
from typing import Final

RIGHT_OF_FIRST: Final = 4  # the first prompt has 1 / 4 of a step
MUCH_SHORTER: Final = 2
LEAST_LED: Final = 128  # tokens that a prompt waits for; fewer take no longer than a step takes anyway


def share_out(budget: int, left: Sequence[int]) -> list[int]:
    """Tokens for each prompt in this step. `left`: tokens that each has still to compute, in order."""
    if not left:
        return []
    shares = [0] * len(left)
    shares[0] = min(left[0], -(-budget // RIGHT_OF_FIRST))
    budget -= shares[0]
    for i in sorted(range(len(left)), key=left.__getitem__):
        more = min(left[i] - shares[i], budget)
        shares[i] += more
        budget -= more
    return shares


def slips_in(left: int, first_left: int) -> bool:
    """Whether a prompt begins before its turn, beside a first one that fills the steps alone."""
    return left * MUCH_SHORTER <= first_left


def follows(left: int, led: int, leader_left: int, step_tokens: int) -> bool:
    """Whether a prompt waits until an earlier one has computed tokens for both of them.

    left: tokens that the prompt would compute now, `led` of them in common with the other one, whose own are
    `leader_left`; step_tokens: the most that a step computes. A much shorter prompt does not wait, because its leader's
    share of the steps is smaller than its own would be.
    """
    return led > min(LEAST_LED, step_tokens // RIGHT_OF_FIRST) and not slips_in(left, leader_left)
