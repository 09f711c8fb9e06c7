"""The changes of the prefix cache since the last step, merged into as few events as possible."""

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from baton_proto.kv_events import DEVICE, DISK, Cleared, KvEvent, Moved, Removed, Stored

GONE: Final = DISK + 1  # the home of a block that is forgotten


@dataclass(slots=True)
class StoredRun:
    """A growing `Stored`: a chain of blocks below `parent`."""

    parent: int | None  # sequence hash
    home: int = DEVICE
    block_hashes: list[int] = field(default_factory=list)
    sequence_hashes: list[int] = field(default_factory=list)

    def event(self) -> Stored:
        return Stored(self.parent, _u64(self.block_hashes), _u64(self.sequence_hashes), self.home)


@dataclass(slots=True)
class MovedBlocks:
    """A growing `Moved` or `Removed`."""

    home: int  # GONE: they are removed
    sequence_hashes: dict[int, None] = field(default_factory=dict)

    def event(self) -> Moved | Removed:
        hashes = _u64(list(self.sequence_hashes))
        return Removed(hashes) if self.home == GONE else Moved(hashes, self.home)


class KvEventLog:
    def __init__(self) -> None:
        self._pending: list[StoredRun | MovedBlocks | Cleared] = []

    def __bool__(self) -> bool:
        return bool(self._pending)

    def stored(
        self, parent: int | None, block_hashes: list[int], sequence_hashes: list[int], home: int = DEVICE
    ) -> None:
        """A chain of blocks below `parent`."""
        last = self._pending[-1] if self._pending else None
        if not isinstance(last, StoredRun) or last.sequence_hashes[-1] != parent or last.home != home:
            last = StoredRun(parent, home)
            self._pending.append(last)
        last.block_hashes += block_hashes
        last.sequence_hashes += sequence_hashes

    def removed(self, sequence_hash: int) -> None:
        self.moved(sequence_hash, GONE)

    def moved(self, sequence_hash: int, home: int) -> None:
        """Because a full tier gives up a block for each that comes, a move is told before the moves of other blocks to
        lower homes. Those blocks lie behind this one or on other paths, so the outcome is the same."""
        place = len(self._pending)
        while place:
            before = self._pending[place - 1]
            if not isinstance(before, MovedBlocks) or before.home < home or sequence_hash in before.sequence_hashes:
                break
            if before.home == home:
                before.sequence_hashes[sequence_hash] = None
                return
            place -= 1
        self._pending.insert(place, MovedBlocks(home, {sequence_hash: None}))

    def cleared(self, remaining: list[StoredRun]) -> None:
        """Replaces the pending events by a `Cleared`, and by the runs that remain cached."""
        self._pending = [Cleared(), *remaining]

    def take(self) -> list[KvEvent]:
        taken, self._pending = self._pending, []
        return [entry.event() if isinstance(entry, StoredRun | MovedBlocks) else entry for entry in taken]


def _u64(hashes: list[int]) -> bytes:
    return np.array(hashes, dtype="<u8").tobytes()
