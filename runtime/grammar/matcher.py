"""Which tokens may come next in answers that have grammars."""

import functools
import os
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

import llguidance
import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int32]  # a bit per token, the lowest first
MAX_THREADS: Final = 8


class Matcher:
    """Follows one answer. Invariant: its state depends on grammar and output alone, so a fresh matcher that reads the
    output so far is as good as one that was there from the start: replay, preemption and hand-over are one path."""

    def __init__(self, inner: llguidance.LLMatcher, num_words: int, eos_token_ids: Collection[int]) -> None:
        self.problem = ""  # why no further mask can be told; the sequence must end
        self.num_read = 0  # tokens of the output
        self.inner = inner
        self._eos = np.zeros(num_words, dtype=np.int32)
        for token_id in eos_token_ids:
            self._eos.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)

    def mask(self, output: Sequence[int], *, ends: bool = True) -> Words:
        """The tokens that may follow `output`, which begins with what was read before; see `fill_masks`."""
        words: Words = np.empty_like(self._eos)
        fill_masks([Asked(self, list(output[self.num_read :]), ends)], words[None])
        return words

    def goes_on(self, new: int, problem: bool) -> bool:
        """Books `new` tokens as read. False: `close` alone says what may follow."""
        self.num_read += new
        if problem or self.inner.is_error():
            self._fail(self.inner.get_error() or "the output does not match")
        return not self.problem and not self.inner.is_stopped()

    def close(self, words: Words, *, computed: bool, any_left: bool, ends: bool) -> None:
        """Corrects `words`, which the library has computed, or not."""
        if computed and self.inner.is_error():
            self._fail(self.inner.get_error())
        elif computed and not any_left:
            self._fail("no token may follow")
        if not computed or self.problem:
            words[:] = self._eos
        elif not ends:
            others = words & ~self._eos
            if others.any():
                words[:] = others

    def _fail(self, problem: str) -> None:
        self.problem = self.problem or f"the grammar cannot be followed: {problem.splitlines()[0]:.200}"


class Asked(NamedTuple):
    """A mask to fill, for the token after `new`."""

    matcher: Matcher
    new: list[int]  # tokens of the output since `matcher.num_read`
    ends: bool  # False forbids EOS while there is another token


def fill_masks(asked: Sequence[Asked], words: Words) -> None:
    """Fills words [len(asked), num_words] with the tokens that may follow, on several threads where there are several
    masks; other Python threads run meanwhile.

    EOS is among them where a grammar is complete, and alone where nothing else may follow, or after a `problem`.
    """
    assert words.flags.c_contiguous
    assert len(words) == len(asked)
    goes_on = [one.matcher.goes_on(len(one.new), not read) for one, read in zip(asked, _read(asked), strict=True)]
    filled = [(asked[row].matcher.inner, row) for row in np.flatnonzero(goes_on).tolist()]
    if len(filled) > 1:
        _threads().unsafe_compute_mask_ptr(filled, words.ctypes.data, words.nbytes // len(words), len(words))
    else:
        for inner, row in filled:
            inner.unsafe_compute_mask_ptr(words[row].ctypes.data, words[row].nbytes)
    any_left = np.any(words, axis=1).tolist()
    for row, one in enumerate(asked):
        one.matcher.close(words[row], computed=goes_on[row], any_left=any_left[row], ends=one.ends)


def _read(asked: Sequence[Asked]) -> list[bool]:
    """Whether each grammar allows its new tokens. Most answers have one new token."""
    single = [(one.matcher.inner, one.new[0]) for one in asked if len(one.new) == 1]
    if len(single) < 2:
        return [one.matcher.inner.consume_tokens(one.new) for one in asked]
    read = iter(_threads().consume_token_par(single))
    return [next(read) if len(one.new) == 1 else one.matcher.inner.consume_tokens(one.new) for one in asked]


@functools.cache
def _threads() -> llguidance.LLExecutor:
    """The other half of the cores is for the engine thread and other processes."""
    return llguidance.LLExecutor(max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2)))
