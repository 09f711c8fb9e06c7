"""Sequences in the order in which they run."""

from bisect import bisect_left, insort
from operator import attrgetter

from engine.sequences.sequence import Sequence

ORDER = attrgetter("order")


class SequenceQueue(list[Sequence]):
    """Invariant: sorted by `Sequence.order`, because only `add` and `remove` change it. Each moves pointers, which
    takes microseconds for thousands of sequences."""

    def add(self, sequence: Sequence) -> None:
        insort(self, sequence, key=ORDER)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self, sequence.order, key=ORDER)
        assert self[index] is sequence
        del self[index]
