"""Which tokens may come next in answers that have grammars."""

import functools
import os
import time
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

import llguidance
import numpy as np
from numpy.typing import NDArray

from runtime.grammar.room import Compiled, GrammarRoom

Words = NDArray[np.int32]  # a bit per token, the lowest first
MAX_THREADS: Final = 16
USUAL_S: Final = 0.02  # of CPU for a mask and the tokens before it; few take 5 ms
MAX_SLOW_S: Final = 0.5  # beyond that, of all masks of an answer: an ambiguous grammar takes longer with each token
SLOW_BATCH_S: Final = 0.05


class EndTokens:
    """The tokens that end answers, as bits of a mask's words. All matchers of one vocabulary share them."""

    def __init__(self, token_ids: Collection[int], num_words: int) -> None:
        whole = np.zeros(num_words, dtype=np.uint32)
        for token_id in token_ids:
            whole[token_id // 32] |= np.uint32(1 << token_id % 32)
        self.token_ids = frozenset(token_ids)
        self.num_words = num_words
        self.at = np.flatnonzero(whole)  # the words that have such a bit: few
        self.bits: Words = whole.view(np.int32)[self.at]


class Matcher:
    """Follows one answer. Invariant: its state depends on grammar and output alone, so a fresh matcher that reads the
    output so far is as good as one that was there from the start: replay, preemption and hand-over are one path."""

    def __init__(self, compiled: Compiled, ends: EndTokens, room: GrammarRoom) -> None:
        self.problem = ""  # why no further mask can be told; the sequence must end
        self.is_invalid = False  # whether that follows from the grammar, and not from an output that is not of it
        self.num_read = 0  # tokens of the output
        self.slow_s = 0.0  # of CPU that its masks took beyond the usual
        self.inner = compiled.inner.deep_copy()
        self.compiled = compiled
        self.ends = ends
        self.room = room

    def mask(self, output: Sequence[int], *, ends: bool = True) -> Words:
        """The tokens that may follow `output`, which begins with what was read before; see `fill_masks`."""
        words: Words = np.empty((1, self.ends.num_words), dtype=np.int32)
        fill_masks([Asked(self, list(output[self.num_read :]), ends)], words)
        row: Words = words[0]
        return row

    def note_read(self, count: int, matches: bool) -> None:
        """Books `count` tokens as read. There is a `problem` when they do not match, or nothing may follow."""
        self.num_read += count
        is_slow = self.slow_s > MAX_SLOW_S
        if self.problem or not (self.compiled.problem or is_slow or not matches or self.inner.is_error()):
            return
        self.is_invalid = matches or self.inner.get_error().startswith(("lexer error", "panic"))
        slow = "its masks take too long; make it simpler" if is_slow else ""
        error = self.inner.get_error() or self.compiled.problem or slow or "the output does not match"
        if "NoExtension" in error:
            error = "no token may follow"
        elif self.is_invalid:  # all its matchers may meet it from now on
            self.room.drop(self.compiled)
        self.problem = f"the grammar cannot be followed: {error.splitlines()[0]:.200}"


class Asked(NamedTuple):
    """A mask to fill, for the token after `new`."""

    matcher: Matcher
    new: list[int]  # tokens of the output since `matcher.num_read`
    ends: bool  # False forbids EOS while there is another token


def fill_masks(asked: Sequence[Asked], words: Words) -> None:
    """Fills words [len(asked), num_words] with the tokens that may follow, on several threads where there are several
    masks; other Python threads run meanwhile. The matchers are of one vocabulary.

    EOS is among them where a grammar is complete, and alone where nothing else may follow, or after a `problem`.
    """
    assert words.flags.c_contiguous
    assert len(words) == len(asked) > 0
    read = _filled(asked, words)
    _put_off_ends(asked, words)
    ends = asked[0].matcher.ends
    for row, (matcher, new, _) in enumerate(asked):
        matcher.note_read(len(new), read[row])
        if matcher.problem:
            words[row] = 0
            words[row, ends.at] = ends.bits


def _filled(asked: Sequence[Asked], words: Words) -> list[bool]:
    """Whether each grammar allows its new tokens; the masks, in `words`, are all that may follow."""
    room = asked[0].matcher.room
    if len(asked) > 1 and (room.is_short or room.is_slow):
        room.is_slow = False
        return [_filled([one], words[row : row + 1])[0] for row, one in enumerate(asked)]
    clock = time.thread_time if len(asked) == 1 else time.monotonic  # other threads work on several masks
    began_s = clock()
    with room.measured([one.matcher.compiled for one in asked], sum(len(one.new) for one in asked)):
        read = _read(asked)
        _compute(asked, words)
    taken_s = clock() - began_s
    if len(asked) == 1:
        asked[0].matcher.slow_s += max(0.0, taken_s - USUAL_S)
    room.is_slow |= taken_s > (USUAL_S if len(asked) == 1 else SLOW_BATCH_S)
    return read


def _read(asked: Sequence[Asked]) -> list[bool]:
    """Whether each grammar allows its new tokens. Most answers have one new token."""
    is_single = [len(one.new) == 1 and not one.matcher.inner.is_stopped() for one in asked]
    single = [(one.matcher.inner, one.new[0]) for one, alone in zip(asked, is_single, strict=True) if alone]
    if len(single) < 2:
        return [_reads(one.matcher, one.new) for one in asked]
    read = iter(_threads().consume_token_par(single))
    return [next(read) if alone else _reads(one.matcher, one.new) for one, alone in zip(asked, is_single, strict=True)]


def _reads(matcher: Matcher, new: list[int]) -> bool:
    """Whether the grammar allows `new`. After its end only EOS may come, any number of times. llguidance itself refuses
    it then or ignores it, depending on the call, and a step that began before the end was known asks for a mask."""
    inner, ends = matcher.inner, matcher.ends.token_ids
    while new:
        if inner.is_stopped():
            return ends.issuperset(new)
        count = next((i for i, token_id in enumerate(new, 1) if token_id in ends), len(new))
        if not inner.consume_tokens(new[:count]):
            return False
        new = new[count:]
    return True


def _compute(asked: Sequence[Asked], words: Words) -> None:
    """A matcher that has ended or failed, also because no token may follow, allows EOS alone."""
    row_bytes = words.nbytes // len(words)
    if len(asked) == 1:
        asked[0].matcher.inner.unsafe_compute_mask_ptr(words.ctypes.data, row_bytes)
    else:
        rows = [(one.matcher.inner, row) for row, one in enumerate(asked)]
        _threads().unsafe_compute_mask_ptr(rows, words.ctypes.data, row_bytes, len(words))


def _put_off_ends(asked: Sequence[Asked], words: Words) -> None:
    """Forbids EOS where it is asked for, and another token is left."""
    ends = asked[0].matcher.ends
    computed = words[:, ends.at]
    may_end = np.array([one.ends for one in asked])
    put_off = np.where(may_end[:, None], 0, computed & ends.bits)
    if put_off.any():
        words[:, ends.at] = computed & ~put_off
        nothing_left = np.bitwise_or.reduce(words, axis=1) == 0
        words[:, ends.at] |= np.where(nothing_left[:, None], put_off, 0)


@functools.cache
def _threads() -> llguidance.LLExecutor:
    """A quarter of the cores is for the engine thread and other processes."""
    return llguidance.LLExecutor(max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) * 3 // 4)))
