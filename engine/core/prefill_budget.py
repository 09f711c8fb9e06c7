"""How prompts share the tokens that a step may compute. Used by the scheduler, and by what simulates it.

In order of arrival alone a question of a hundred tokens would wait for the whole of a book that came before it. So only
a quarter of a step is the first prompt's by right, and the rest goes where least is left: a long prompt takes at most
four times as long, and only while shorter ones come.
"""

from collections.abc import Sequence
from typing import Final

RIGHT_OF_FIRST: Final = 4  # of a step: this part
MUCH_SHORTER: Final = 2


def share_out(budget: int, left: Sequence[int]) -> list[int]:
    """Tokens for each prompt in this step. `left`: tokens that each has still to compute, the first in order first."""
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
    """Whether a prompt begins before its turn, beside a first one that fills the steps by itself. Not if they are much
    alike: they may have a prefix in common, which is then computed once and found by the second."""
    return left * MUCH_SHORTER <= first_left
