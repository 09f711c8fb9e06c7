"""How prompts share the tokens that a step may compute.

In order of arrival alone, a question of a hundred tokens would wait for a whole book that came before it. Therefore
only a quarter of a step belongs to the first prompt by right, and the rest goes to the prompts with the fewest tokens
left. A long prompt takes at most four times as long, and only while shorter ones arrive.

A prompt may have a time at which its first token is due. While all are in time, nothing of this changes. A prompt that
might be late if others had the next step goes before them, earliest due first; one that is late whatever happens goes
after them, because what it takes would make others late, too. The first one that has to stand back keeps a small part
of each step, and the first one that waits keeps its place though it is late, so that each comes to an end however many
are in danger.

A prompt whose next tokens an earlier one computes right now waits until they are cached. Each token is then computed
once, however many prompts with the same beginning come at the same time; who is late is judged accordingly.
"""

from bisect import bisect_left
from collections.abc import Sequence
from math import ceil, inf
from typing import Final, NamedTuple

RIGHT_OF_FIRST: Final = 4  # the first prompt has 1 / 4 of a step
MUCH_SHORTER: Final = 2
RIGHT_BESIDE_DANGER: Final = 32  # beside prompts in danger, the first of the others has 1 / 32 of a step
CAUTION: Final = 1.5  # a first token is in danger when it would be late if all took so many times as long
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


class Due(NamedTuple):
    """A prompt's first token, in seconds."""

    left_s: float  # what computing the rest of the prompt takes alone
    due_s: float  # from now on; infinite: at no time


class ComingBlocks:
    """Blocks that prompts are about to compute, in the order in which their first tokens are due. Whoever comes behind
    them and begins alike finds these blocks cached.

    Each prompt is one entry, whatever its length, because a hash tells all blocks before it too: who has the same hash
    at a place has the same beginning.
    """

    def __init__(self) -> None:
        self._by_first: dict[int, Sequence[int]] = {}  # hashes of a prompt, by that of the first block it computes
        self._total_s = 0.0  # what computing them all takes

    def start(self, hashes: Sequence[int], first: int, end: int) -> int:
        """The first block that a prompt with these hashes has to compute itself, at most `end`. first: blocks that are
        cached."""
        while first < end and (other := self._by_first.get(hashes[first])) is not None:
            first = _parting(hashes, other, first, end)
        return min(first, end)

    def add(self, hashes: Sequence[int], first: int, due: Due) -> None:
        """A prompt with these hashes computes its blocks from `first` on, unless it is surely late: then it goes last,
        and nobody waits for it."""
        if self._total_s + due.left_s > due.due_s:
            return
        self._total_s += due.left_s
        while first < len(hashes) and (other := self._by_first.setdefault(hashes[first], hashes)) is not hashes:
            first = _parting(hashes, other, first, len(hashes))


def _parting(hashes: Sequence[int], other: Sequence[int], first: int, end: int) -> int:
    """The first block, at most `end`, in which prompts differ that have block `first` in common."""
    return bisect_left(range(min(end, len(other))), True, lo=first + 1, key=lambda i: hashes[i] != other[i])


class Turns(NamedTuple):
    first: list[int]  # indices of the prompts that go before all others, in order
    late: list[int]  # of those that go after all others


def turns(prompts: Sequence[Due], step_s: float) -> Turns:
    """Returns who is in danger and who is late. step_s: the time of a full step; a prompt is complete when its step
    ends."""
    dated = sorted((i for i, prompt in enumerate(prompts) if prompt.due_s < inf), key=lambda i: prompts[i].due_s)
    all_s = sum(prompts[i].left_s for i in dated)
    in_time: list[int] = []
    late: list[int] = []
    total_s, num_in_danger = 0.0, 0
    for i in dated:
        left_s, due_s = prompts[i]
        end_s = max(total_s + left_s, min(ceil((total_s + left_s) / step_s) * step_s, all_s))
        if end_s > due_s:
            late.append(i)
            all_s -= left_s
            continue
        total_s += left_s
        in_time.append(i)
        if CAUTION * end_s + step_s > due_s:
            num_in_danger = len(in_time)
    return Turns(in_time[:num_in_danger], late)


def share_by_turns(budget: int, left: Sequence[int], order: Turns) -> list[int]:
    """Shares a step out like share_out(), where some prompts are in danger or late."""
    shares = [0] * len(left)
    first, late = order

    def give(i: int, most: int) -> int:
        more = min(left[i] - shares[i], most)
        shares[i] += more
        return more

    others = [i for i in range(len(left)) if i not in first]
    if others and (first or late):
        budget -= give(others[0], -(-budget // RIGHT_BESIDE_DANGER))
    for i in first:
        budget -= give(i, budget)
    rest = [i for i in others if i not in late]
    for i, more in zip(rest, share_out(budget, [left[i] - shares[i] for i in rest]), strict=True):
        budget -= give(i, more)
    for i in sorted(late):
        budget -= give(i, budget)
    return shares
