"""The room that compiled grammars take in a process: which are kept, and which have grown too large.

A compiled grammar and its matchers share a lexer, whose states multiply with what answers make it read. Nothing tells
its size, so the growth of the process's heap is measured while masks are computed.
"""

import ctypes
import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final
from weakref import WeakSet

import llguidance

from baton_proto.grammar import Grammar

MAX_KEPT: Final = 256
MAX_KEPT_BYTES: Final = 32 * 1024 * 1024
MAX_GRAMMAR_BYTES: Final = 32 * 1024 * 1024  # of one; a helper lets through 20 MiB when it is compiled
MAX_BYTES: Final = 96 * 1024 * 1024  # of all, those that answers still follow included
WORN_BYTES: Final = (
    4 * 1024 * 1024
)  # what has grown by more is kept no longer: the next answer begins with fresh states
PER_GRAMMAR_BYTES: Final = 64 * 1024  # beside what was measured
TOKEN_BYTES: Final = 512  # that a token of an answer may add until the answer ends: most add 150
SHARE: Final = 0.02  # of the time, that measuring may take
NOTICED_BYTES: Final = 64 * 1024


class Compiled:
    """`grown`: bytes, measured or estimated."""

    def __init__(self, inner: llguidance.LLMatcher, held_bytes: int) -> None:
        self.inner = inner
        self.held_bytes = held_bytes + PER_GRAMMAR_BYTES
        self.grown = 0  # beyond what tokens may add
        self.problem = ""  # why no answer may follow it any more

    @property
    def num_bytes(self) -> int:
        return self.held_bytes + max(0, self.grown)


class GrammarRoom:
    """Any thread may call; `measured` and `is_short` are the engine thread's."""

    def __init__(self) -> None:
        self.is_short = False  # then masks are computed one by one, so that each grammar's own growth is known
        self.is_slow = False  # likewise the next ones, so that each one's own time is known
        self._kept: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._live: WeakSet[Compiled] = WeakSet()
        self._lock = threading.Lock()
        self._takes_s = 1e-5  # to measure once
        self._next_s = 0.0  # when measuring has taken no more than its share, on time.monotonic()

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

    @contextmanager
    def measured(self, filled: Sequence[Compiled], num_tokens: int) -> Iterator[None]:
        """Measures the block, in which masks of these grammars are computed, which share the growth; each of the tokens
        that are read may add some bytes. Not measured when the last time was just now: a step of an engine takes
        longer."""
        began_s = time.monotonic()
        if began_s < self._next_s:
            yield
            return
        before = heap_bytes()
        self._takes_s = min(time.monotonic() - began_s, 2 * self._takes_s)  # a thread may stand still in between
        yield
        grown = heap_bytes() - before - TOKEN_BYTES * num_tokens
        self._next_s = time.monotonic() + 2 * self._takes_s / SHARE
        for compiled in filled:
            compiled.grown += grown // len(filled)
        if grown > NOTICED_BYTES or self.is_short:
            self._check(filled)

    def _check(self, filled: Sequence[Compiled]) -> None:
        for compiled in filled:
            if compiled.grown > WORN_BYTES:
                self.drop(compiled)
            if len(filled) == 1 and compiled.num_bytes > MAX_GRAMMAR_BYTES:
                compiled.problem = f"it takes more than {MAX_GRAMMAR_BYTES >> 20} MiB; make it simpler"
        with self._lock:
            self._make_room()
            following = [compiled for compiled in self._live if not compiled.problem]
            total = sum(compiled.num_bytes for compiled in following)
            self.is_short = total > MAX_BYTES // 2
            if total > MAX_BYTES:
                largest = max(following, key=lambda compiled: compiled.num_bytes)
                largest.problem = f"all together take more than {MAX_BYTES >> 20} MiB, and it the most; make it simpler"

    def _make_room(self) -> None:
        while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
            self._kept.popitem(last=False)

    @property
    def _kept_bytes(self) -> int:
        return sum(compiled.num_bytes for compiled in self._kept.values())


class _Mallinfo2(ctypes.Structure):
    """The structure of glibc since 2.33."""

    _fields_ = [("sizes", ctypes.c_size_t * 10)]


HBLKHD, UORDBLKS = 4, 7  # places of mapped bytes, and of those in small pieces


def heap_bytes() -> int:
    """Bytes that native code holds, as the C library counts them, of all threads together; what llguidance has
    allocated is among them. 0 where the C library does not tell."""
    mallinfo2 = _mallinfo2()
    if mallinfo2 is None:
        return 0
    told = mallinfo2()
    return int(told.sizes[UORDBLKS] + told.sizes[HBLKHD])


@functools.cache
def _mallinfo2() -> Callable[[], _Mallinfo2] | None:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _Mallinfo2
    return function
