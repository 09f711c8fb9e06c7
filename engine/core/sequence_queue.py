"""Sequences in their order: higher priority first, then earlier arrival."""

from bisect import bisect_left, insort
from operator import attrgetter

from engine.core.sequence import Sequence

_order = attrgetter("order")


class SequenceQueue(list[Sequence]):
    """Invariant: sorted by `Sequence.order`, because only `add` and `remove` change it. Each moves pointers, which
    takes microseconds for thousands of sequences."""

    def add(self, sequence: Sequence) -> None:
        insort(self, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self, sequence.order, key=_order)
        assert self[index] is sequence
        del self[index]
