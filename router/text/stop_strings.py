"""Finds stop strings in text that arrives in pieces of any size, and shows no character of them unless told to.

Wherever the pieces are cut, the stop string that is complete first ends the text; when several are complete at the same
character, the longest does. The text before it is shown. A character costs the same however long the stop strings are.
"""

from collections.abc import Sequence


class StopStrings:
    def __init__(self, stop: Sequence[str], included: bool = False) -> None:
        """`included`: the stop string that ends the text is shown."""
        assert all(stop), "an empty stop string would end every text"
        self._followed = [_Followed(one) for one in stop]
        self._included = included
        self.found: str | None = None  # what has ended the text
        self._held = ""  # the longest end of the text that may begin a stop string

    def push(self, text: str) -> tuple[str, bool]:
        """Text that may be shown now, and whether a stop string is complete; nothing may follow then."""
        num_held = len(self._held)
        matches = [(end, -len(one.stop), one.stop) for one in self._followed if (end := one.read(text))]
        text = self._held + text
        if matches:
            self._held = ""
            end, _, self.found = min(matches)
            return text[: num_held + end - (0 if self._included else len(self.found))], True
        cut = len(text) - max((one.matched for one in self._followed), default=0)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """Returns the text that was held back, when no more comes."""
        held, self._held = self._held, ""
        return held


class _Followed:
    """One stop string, and how much of it the text ends with. By the algorithm of Knuth, Morris and Pratt, each
    character is read at most twice; their table is worked out as far as the text has come."""

    __slots__ = ("_shorter", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # characters of `stop` that the text ends with
        self._shorter = [0, 0]  # of so many matched characters: the next smaller number that the text ends with, too

    def read(self, text: str) -> int:
        """Returns how many characters of `text` complete the stop string; 0: it is not complete."""
        stop, matched, at = self.stop, self.matched, 0
        while at < len(text):
            if not matched and (at := text.find(stop[0], at)) < 0:
                break
            while matched and stop[matched] != text[at]:
                matched = self._shorter[matched]
            if stop[matched] == text[at]:
                matched += 1
            at += 1
            if matched == len(stop):
                return at
            if matched == len(self._shorter):
                self._shorter.append(self._border(matched))
        self.matched = matched
        return 0

    def _border(self, length: int) -> int:
        """The longest beginning of the stop string's first `length` characters, not all of them, that ends them."""
        last, border = self.stop[length - 1], self._shorter[length - 1]
        while border and self.stop[border] != last:
            border = self._shorter[border]
        return border + (self.stop[border] == last)
