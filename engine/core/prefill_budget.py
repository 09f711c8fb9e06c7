"""How prompts share the tokens that a step may compute.

In order of arrival alone, a question of a hundred tokens would wait for a whole book that came before it. Therefore
only a quarter of a step belongs to the first prompt by right, and the rest goes to the prompts with the fewest tokens
left. A long prompt takes at most four times as long, and only while shorter ones arrive.
"""

from collections.abc import Sequence
from typing import Final

RIGHT_OF_FIRST: Final = 4  # the first prompt has 1 / 4 of a step
MUCH_SHORTER: Final = 2


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
    """Whether a prompt begins before its turn, beside a first one that fills the steps alone. Prompts of similar length
    do not, because they may share a prefix: the second one waits and finds it cached."""
    return left * MUCH_SHORTER <= first_left
