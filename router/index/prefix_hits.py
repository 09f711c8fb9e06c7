"""Which prefixes requests have reused lately: counts by the last block that was reused, once per placed request.

`recent` tells placement which prefixes are asked for so often that every worker should have them. Bounded: whenever too
many prefixes are known, all counts are halved, so that unused prefixes fade.
"""

import math
import time
from collections.abc import Callable
from typing import Final

MAX_PREFIXES: Final = 4096
RECENT_S: Final = 10.0  # after this time a reuse weighs half


class _Hits:
    __slots__ = ("at_s", "count", "recent")

    def __init__(self) -> None:
        self.count = 0
        self.recent = 0.0  # at `at_s`
        self.at_s = 0.0

    def recent_at(self, now_s: float) -> float:
        return self.recent * math.exp2((self.at_s - now_s) / RECENT_S)


class PrefixHits:
    def __init__(self, max_prefixes: int = MAX_PREFIXES, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_prefixes = max_prefixes
        self._clock = clock
        self._hits: dict[bytes, _Hits] = {}

    def count(self, last_block: bytes) -> None:
        """`last_block`: sequence hash (u64 LE) of the prefix's last block; empty when nothing was reused."""
        if not last_block:
            return
        hits = self._hits.get(last_block)
        if hits is None:
            hits = self._hits[last_block] = _Hits()
        now_s = self._clock()
        hits.count, hits.recent, hits.at_s = hits.count + 1, hits.recent_at(now_s) + 1, now_s
        if len(self._hits) > self._max_prefixes:
            self._fade()

    def counts(self) -> dict[bytes, int]:
        return {block: hits.count for block, hits in self._hits.items()}

    def recent(self, last_block: bytes) -> float:
        """How often the prefix was reused; each reuse is halved for every RECENT_S since."""
        hits = self._hits.get(last_block)
        return hits.recent_at(self._clock()) if hits is not None else 0.0

    def _fade(self) -> None:
        while len(self._hits) > self._max_prefixes // 2:
            self._hits = {block: hits for block, hits in self._hits.items() if hits.count > 1}
            for hits in self._hits.values():
                hits.count //= 2
