"""Cached blocks that somebody asked to keep: until when, and what kind they are without that."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from engine.blocks.resting import REUSED

SHARE: Final = 0.25  # of all blocks, at most


@dataclass(slots=True)
class _Entry:
    kind: int
    until_s: float


class Kept:
    """Invariant: who keeps a block keeps its parent, at least as long. Hence parents come before children here."""

    def __init__(self, num_blocks: int) -> None:
        self._limit = int(num_blocks * SHARE)
        self._entries: dict[int, _Entry] = {}  # by sequence hash
        self._next_s = math.inf  # nothing ends before

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, sequence_hash: int, kind: int, until_s: float) -> bool:
        """`kind`: the block's own, when it is not kept yet. False: too many are kept."""
        until_s = math.ceil(until_s)  # so that there is something to look for once a second
        entry = self._entries.get(sequence_hash)
        if entry is None:
            if len(self._entries) >= self._limit:
                return False
            entry = self._entries[sequence_hash] = _Entry(kind, until_s)
        entry.until_s = max(entry.until_s, until_s)
        self._next_s = min(self._next_s, entry.until_s)
        return True

    def kind(self, sequence_hash: int, kind: int) -> int:
        """What a block of that kind is without being kept."""
        entry = self._entries.get(sequence_hash)
        return kind if entry is None else entry.kind

    def reused(self, sequence_hash: int) -> None:
        entry = self._entries[sequence_hash]
        entry.kind = REUSED[entry.kind]

    def discard(self, sequence_hash: int) -> None:
        self._entries.pop(sequence_hash, None)

    def take_expired(self, now_s: float) -> Iterator[tuple[int, int]]:
        """(sequence hash, kind) of blocks whose time is over, children before parents."""
        if now_s < self._next_s:
            return
        expired = [(block, entry.kind) for block, entry in reversed(self._entries.items()) if entry.until_s <= now_s]
        for sequence_hash, _ in expired:
            del self._entries[sequence_hash]
        self._next_s = min((entry.until_s for entry in self._entries.values()), default=math.inf)
        yield from expired
