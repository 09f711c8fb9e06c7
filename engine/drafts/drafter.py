"""Who guesses what a sequence says next: n-grams (ngrams.py), or a trained draft model in their place."""

from collections.abc import Sequence as Run
from typing import Protocol

from engine.sequences.sequence import Sequence


class Drafter(Protocol):
    """Engine thread only. A wrong guess costs time and no more: answers do not depend on drafters."""

    def draft(self, wanted: Run[tuple[Sequence, int]]) -> list[list[int]]:
        """For each sequence up to so many tokens that may follow its known ones; none: it has no guess."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
