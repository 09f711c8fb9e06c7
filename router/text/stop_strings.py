"""Finds stop strings in text that arrives in pieces of any size, and shows no character of them.

Wherever the pieces are cut, the stop string that is complete first ends the text; when several are complete at the same
character, the longest does. The text before it is shown.
"""


class StopStrings:
    def __init__(self, stop: tuple[str, ...]) -> None:
        assert all(stop), "an empty stop string would end every text"
        self._stop = stop
        self.found: str | None = None  # what has ended the text
        self._held = ""  # the longest end of the text that may begin a stop string

    def push(self, text: str) -> tuple[str, bool]:
        """Text that may be shown now, and whether a stop string is complete; nothing may follow then."""
        text = self._held + text
        matches = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if matches:
            self._held = ""
            _, start, self.found = min(matches)
            return text[:start], True
        cut = len(text) - self._possible_start(text)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
