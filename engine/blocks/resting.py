"""The order in which resting blocks are given up: the oldest first, and some kinds of blocks age faster than others."""

from collections import OrderedDict
from collections.abc import Iterator
from heapq import merge
from itertools import chain
from operator import itemgetter
from typing import Final

# Kinds of blocks, and how fast each ages while it rests: an answer's, a prompt's by its length, and from SHORT + 1 on
# one kind per reuse. The rates are from a trace of conversations, in which a prompt's new block is reused with a chance
# of 26 % (33 % below 8k tokens, 22 % above 32k), and with 46, 54, 62, 70 and 96 % after 1, 2, 3, 4 and more than 6
# reuses. An answer's block is reused less often, because the next prompt leaves out its reasoning. See
# benchmarks/routing_quality.py.
OUTPUT, LONG, MEDIUM, SHORT = range(4)
# Blocks that somebody asked to keep do not age.
AGING: Final = (8.0, 1.5, 1.0, 0.7, 0.5, 0.4, 0.3, 0.25, 0.2, 0.05, 0.0)
KEPT: Final = len(AGING) - 1
LONG_TOKENS, MEDIUM_TOKENS = 32768, 8192  # of a prompt, at least
REUSED: Final = bytes([*(min(max(kind, SHORT) + 1, KEPT - 1) for kind in range(KEPT)), KEPT])
"""Kind -> kind after a reuse."""


def prompt_kind(num_tokens: int) -> int:
    """The kind of a prompt's new blocks."""
    if num_tokens >= LONG_TOKENS:
        return LONG
    return MEDIUM if num_tokens >= MEDIUM_TOKENS else SHORT


class Resting:
    """The resting blocks of one tier. A time is the number of blocks that have come to rest before. Invariant: blocks
    of one kind are added in the order of their times."""

    def __init__(self) -> None:
        self.by_kind: list[OrderedDict[int, int]] = [OrderedDict() for _ in AGING]  # block -> when it came to rest

    def __len__(self) -> int:
        return sum(map(len, self.by_kind))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.by_kind)

    def oldest(self, now: int) -> tuple[float, int]:
        """(age, kind) of the block to give up next; an age below all others when nothing rests. Of equals it is the one
        of the lowest kind, because a child's kind is not above its parent's."""
        most, of = -1.0, 0
        for kind, blocks in enumerate(self.by_kind):
            if blocks and (age := (now - next(iter(blocks.values()))) * AGING[kind]) > most:
                most, of = age, kind
        return most, of

    def youngest(self, now: int) -> Iterator[tuple[float, int]]:
        """(age, block), those that would be given up last first: parents before children."""
        queues = [
            [((now - at) * rate, -kind, block) for block, at in reversed(blocks.items())]
            for kind, (blocks, rate) in enumerate(zip(self.by_kind, AGING, strict=True))
        ]
        return ((age, block) for age, _, block in merge(*queues, key=itemgetter(0, 1)))

    def add(self, kind: int, block: int, at: int) -> None:
        """Adds a block at its place. That is the last one, except for blocks that were kept and begin to age here."""
        queue, later = self.by_kind[kind], []
        while queue and next(reversed(queue.values())) > at:
            later.append(queue.popitem())
        queue[block] = at
        queue.update(reversed(later))

    def pop(self, kind: int) -> tuple[int, int]:
        """Takes out the oldest block of a kind. Returns it and when it came to rest."""
        return self.by_kind[kind].popitem(last=False)

    def clear(self) -> list[int]:
        blocks = list(self)
        for resting in self.by_kind:
            resting.clear()
        return blocks
