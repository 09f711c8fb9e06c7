"""Which tokens may come next in an answer that has a grammar."""

from collections.abc import Collection, Sequence

import llguidance
import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int32]  # a bit per token, the lowest first


class Matcher:
    """Follows one answer. Invariant: its state depends on grammar and output alone, so a fresh matcher that reads the
    output so far is as good as one that was there from the start: replay, preemption and hand-over are one path."""

    def __init__(self, inner: llguidance.LLMatcher, num_words: int, eos_token_ids: Collection[int]) -> None:
        self.problem = ""  # why no further mask can be told; the sequence must end
        self._inner = inner
        self._num_read = 0  # tokens of the output
        self._eos = np.zeros(num_words, dtype=np.int32)
        for token_id in eos_token_ids:
            self._eos.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)

    def mask(self, output: Sequence[int], *, ends: bool = True) -> Words:
        """The tokens that may follow `output`, which begins with the output of the calls before.

        EOS is among them where the grammar is complete, and alone where nothing else may follow. ends: False forbids
        it while there is another token. After a `problem`, EOS alone.
        """
        words = np.empty_like(self._eos)
        if not self._inner.consume_tokens(list(output[self._num_read :])):
            return self._failed(self._inner.get_error() or "the output does not match")
        self._num_read = len(output)
        if self._inner.is_stopped() and not self._inner.is_error():
            return self._eos
        self._inner.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._inner.is_error():
            return self._failed(self._inner.get_error())
        if not ends:
            others = words & ~self._eos
            words = others if others.any() else words
        return words if words.any() else self._failed("no token may follow")

    def _failed(self, problem: str) -> Words:
        self.problem = self.problem or f"the grammar cannot be followed: {problem.splitlines()[0]:.200}"
        return self._eos
