"""Guesses from a sequence's own tokens: what followed when its last few tokens came before, in prompt or answer."""

from collections.abc import Sequence as Run
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.sequences.sequence import Sequence

SIZES: Final = (5, 3)  # tokens of an n-gram; the first that is found counts. What follows 2 is wrong too often.
MOST_TOKENS: Final = 1 << 15  # of a sequence's end, whose n-grams are known
LEAST_SLOTS: Final = 1 << 10
FACTOR: Final = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: Fibonacci hashing (Knuth, TAOCP 6.4)


class NgramIndex:
    """Where the n-grams of one size came last: a table of 16 to 32 bytes a token, where of n-grams in one slot the
    newest stays. A token costs a hash. Tokens are only ever appended."""

    def __init__(self, size: int, num_tokens: int) -> None:
        """num_tokens: of the sequence when it ends."""
        bits = (max(LEAST_SLOTS, 4 * min(num_tokens, MOST_TOKENS)) - 1).bit_length()
        self.size = size
        self._shift = np.uint64(64 - bits)
        self._ends = np.full(1 << bits, -1, dtype=np.int32)  # -1: none
        self._known = 0  # n-grams that end before this place are in the table

    def find(self, tokens: list[int], end: int) -> int | None:
        """Where the last n-gram ends that equals the one before `end`, and comes before it."""
        size = self.size
        first = max(self._known, size, end - MOST_TOKENS)  # the first end of an n-gram that the table lacks
        if end < first:
            return None
        slots = self._slots(np.array(tokens[first - size : end], dtype=np.uint64))
        self._ends[slots[:-1]] = np.arange(first, end, dtype=np.int32)
        self._known = end
        found = int(self._ends[slots[-1]])
        if found < 0 or tokens[found - size : found] != tokens[end - size : end]:
            return None
        return found

    def _slots(self, tokens: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """A slot for each n-gram of the tokens."""
        count = len(tokens) - self.size + 1
        hashes = np.zeros(count, dtype=np.uint64)
        for place in range(self.size):
            hashes = (hashes + tokens[place : place + count] + np.uint64(1)) * np.uint64(FACTOR)
        return hashes >> self._shift


class NgramDrafter:
    """Implements `engine.drafts.drafter.Drafter`."""

    def __init__(self) -> None:
        self._of: dict[Sequence, list[NgramIndex]] = {}

    def draft(self, wanted: Run[tuple[Sequence, int]]) -> list[list[int]]:
        return [self._guess(sequence, most) for sequence, most in wanted]

    def forget(self, sequence: Sequence) -> None:
        self._of.pop(sequence, None)

    def _guess(self, sequence: Sequence, most: int) -> list[int]:
        indexes = self._of.get(sequence)
        if indexes is None:
            num_tokens = sequence.num_prompt_tokens + sequence.sampling.max_tokens
            indexes = self._of[sequence] = [NgramIndex(size, num_tokens) for size in SIZES]
        tokens, end = sequence.token_ids, sequence.num_known_tokens
        # All of them look, because looking is how an index learns.
        found = [place for index in indexes if (place := index.find(tokens, end)) is not None]
        if not found:
            return []
        # What repeats itself goes on as it does: the guess may run into itself.
        period = end - found[0]
        return [tokens[found[0] + at % period] for at in range(most)]
