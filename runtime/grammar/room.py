"""The room that compiled grammars take in a process: which are kept, and which have grown too large.

A compiled grammar and its matchers share a lexer, whose states multiply with what answers make it read. Nothing tells
its size, so the growth of the process's heap is measured around a sample of the masks.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from weakref import WeakSet

import llguidance

from baton_proto.grammar import Grammar
from runtime.grammar.heap import heap_bytes

MAX_KEPT: Final = 256
MAX_KEPT_BYTES: Final = 64 * 1024 * 1024
MAX_GRAMMAR_BYTES: Final = 32 * 1024 * 1024  # of one; 16 MiB at most are there when it is compiled
MAX_BYTES: Final = 128 * 1024 * 1024  # of all, those that answers still follow included
WORN_BYTES: Final = (
    4 * 1024 * 1024
)  # what has grown by more is kept no longer: the next answer begins with fresh states
PER_GRAMMAR_BYTES: Final = 64 * 1024  # beside what was measured
SAMPLED: Final = 4  # masks of a step at most
SHARE: Final = 0.01  # of the time, that measuring may take


class Compiled:
    """`grown`: bytes, measured or estimated."""

    def __init__(self, inner: llguidance.LLMatcher, held_bytes: int) -> None:
        self.inner = inner
        self.held_bytes = held_bytes + PER_GRAMMAR_BYTES
        self.grown = 0
        self.unmeasured = 0  # masks since the last that was measured
        self.problem = ""  # why no answer may follow it any more

    @property
    def num_bytes(self) -> int:
        return self.held_bytes + max(0, self.grown)


class GrammarRoom:
    """Any thread may call. `sampled` and `measured` are the engine thread's."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._live: WeakSet[Compiled] = WeakSet()
        self._lock = threading.Lock()
        self._next_row = 0
        self._next_s = 0.0  # when measuring has used no more than its share, on time.monotonic()

    def find(self, grammar: Grammar) -> Compiled | None:
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
            return self._kept.get(grammar)

    def keep(self, grammar: Grammar, compiled: Compiled) -> None:
        with self._lock:
            self._live.add(compiled)
            self._kept[grammar] = compiled
            self._make_room()

    def drop(self, compiled: Compiled) -> None:
        """Keeps it no longer. Its matchers stay."""
        with self._lock:
            for grammar in [grammar for grammar, kept in self._kept.items() if kept is compiled]:
                del self._kept[grammar]

    def sampled(self, count: int) -> list[int]:
        """The rows of `count` masks that are to be measured now, in turn."""
        if time.monotonic() < self._next_s:
            return []
        first, self._next_row = self._next_row, self._next_row + SAMPLED
        return sorted({(first + i) % count for i in range(SAMPLED)})

    @contextmanager
    def measured(self, compiled: Compiled) -> Iterator[None]:
        """Around a mask. Masks that nobody measured count as this one."""
        began_s = time.monotonic()
        before = heap_bytes()
        counted_s = time.monotonic()
        yield
        compiled.grown += (heap_bytes() - before) * (compiled.unmeasured + 1)
        compiled.unmeasured = 0
        self._next_s = counted_s + 2 * (counted_s - began_s) / SHARE
        if compiled.grown > WORN_BYTES:
            self._check(compiled)

    def _check(self, compiled: Compiled) -> None:
        self.drop(compiled)
        if compiled.num_bytes > MAX_GRAMMAR_BYTES:
            compiled.problem = f"it takes more than {MAX_GRAMMAR_BYTES >> 20} MiB; make it simpler"
        with self._lock:
            self._make_room()
            following = [each for each in self._live if not each.problem]
            if sum(each.num_bytes for each in following) > MAX_BYTES:
                largest = max(following, key=lambda each: each.num_bytes)
                largest.problem = f"all together take more than {MAX_BYTES >> 20} MiB, and it the most; make it simpler"

    def _make_room(self) -> None:
        while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
            self._kept.popitem(last=False)

    @property
    def _kept_bytes(self) -> int:
        return sum(compiled.num_bytes for compiled in self._kept.values())
