"""Which prefixes requests reuse, lately: counts by the last block that was reused.

Counted once per request that is placed, by the indexer; read by tree_view. Bounded, and what is not used any more
fades: whenever too many prefixes are known, all counts are halved.
"""

from typing import Final

MAX_PREFIXES: Final = 4096


class PrefixHits:
    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._counts: dict[bytes, int] = {}

    def count(self, last_block: bytes) -> None:
        """`last_block`: sequence hash (u64 LE) of the prefix's last block; empty when nothing was reused."""
        if last_block:
            self._counts[last_block] = self._counts.get(last_block, 0) + 1
            if len(self._counts) > self._max_prefixes:
                self._fade()

    def counts(self) -> dict[bytes, int]:
        return dict(self._counts)

    def _fade(self) -> None:
        while len(self._counts) > self._max_prefixes // 2:
            self._counts = {block: count // 2 for block, count in self._counts.items() if count > 1}
