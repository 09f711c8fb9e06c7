"""Whether a server's events tell of the blocks that it computes for us. Pure.

`events` of serving.yaml may name another server's socket, whose blocks would be taken for this one's: prompts would go
where nothing of them is cached, and nobody would see more than slow answers.
"""

from collections.abc import Container
from typing import Final

WAIT_S: Final = 10.0  # for the event of a block that was computed
IN_A_ROW: Final = 3  # prompts without: a single one may have been cached before we followed the events


class ToldBlocks:
    """`held`: the blocks that the events have told of, by sequence hash. Times are on the caller's clock."""

    def __init__(self, held: Container[int]) -> None:
        self._held = held
        self._waiting: dict[int, float] = {}  # block -> when its event is late
        self._late: set[int] = set()

    def computed(self, block: int, now_s: float) -> None:
        """The last full block of a prompt."""
        if len(self._waiting) < IN_A_ROW and block not in self._late:
            self._waiting.setdefault(block, now_s + WAIT_S)

    def look(self, now_s: float, *, is_blind: bool) -> None:
        """From time to time. `is_blind`: events could not be followed lately, so that nothing is late."""
        told = any(block in self._held for block in self._waiting)
        if told or is_blind:
            self._waiting.clear()
            self._late.clear()
        for block in [block for block, late_s in self._waiting.items() if now_s >= late_s]:
            del self._waiting[block]
            self._late.add(block)

    @property
    def note(self) -> str:
        if len(self._late) < IN_A_ROW:
            return ""
        return "its KV events do not tell of what it computes: `events` and `replay` may be another server's"
