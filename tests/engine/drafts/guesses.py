"""A drafter for tests, which knows the answers and is wrong as often as it is told to be."""

import random
from collections.abc import Callable, Sequence as Run

from engine.sequences.sequence import Sequence

NOT_A_TOKEN = 1  # no model of the tests says it often


class Guesses:
    """Implements `engine.drafts.drafter.Drafter`. answer: the tokens that a sequence will say after so many known ones,
    as far as is known."""

    def __init__(self, answer: Callable[[Sequence, int], Run[int]], right: float, seed: int = 0) -> None:
        """right: the part of the tokens that are guessed right."""
        self._answer = answer
        self._right = right
        self._random = random.Random(seed)
        self.known: dict[Sequence, int] = {}  # how often each was asked for

    def draft(self, wanted: Run[tuple[Sequence, int]]) -> list[list[int]]:
        return [self._guess(sequence, most) for sequence, most in wanted]

    def forget(self, sequence: Sequence) -> None:
        self.known.pop(sequence, None)

    def _guess(self, sequence: Sequence, most: int) -> list[int]:
        self.known[sequence] = self.known.get(sequence, 0) + 1
        answer = self._answer(sequence, most)[: self._random.randint(0, most)]
        return [token if self._random.random() < self._right else NOT_A_TOKEN for token in answer]
