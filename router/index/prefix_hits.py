"""Which prefixes requests have reused: counts by the last block that was reused, once per placed request, for people.

Bounded: whenever too many prefixes are known, all counts are halved, so that unused prefixes fade.
"""

from typing import Final

MAX_PREFIXES: Final = 4096


class PrefixHits:
    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._counts: dict[bytes, int] = {}

    def count(self, last_block: bytes) -> None:
        """`last_block`: sequence hash (u64 LE) of the prefix's last block; empty when nothing was reused."""
        if not last_block:
            return
        self._counts[last_block] = self._counts.get(last_block, 0) + 1
        while len(self._counts) > self._max_prefixes:
            self._fade()

    def counts(self) -> dict[bytes, int]:
        return dict(self._counts)

    def _fade(self) -> None:
        while len(self._counts) > self._max_prefixes // 2:
            self._counts = {block: count // 2 for block, count in self._counts.items() if count > 1}
