"""The changes of the prefix cache since the last step, merged into as few events as possible."""

from dataclasses import dataclass, field

import numpy as np

from baton_proto.kv_events import Cleared, KvEvent, Removed, Stored


@dataclass(slots=True)
class StoredRun:
    """A growing `Stored`: a chain of blocks below `parent`."""

    parent: int | None  # sequence hash
    block_hashes: list[int] = field(default_factory=list)
    sequence_hashes: list[int] = field(default_factory=list)

    def event(self) -> Stored:
        return Stored(self.parent, _u64(self.block_hashes), _u64(self.sequence_hashes))


class KvEventLog:
    def __init__(self) -> None:
        self._pending: list[StoredRun | list[int] | Cleared] = []  # a list of sequence hashes is a `Removed`

    def __bool__(self) -> bool:
        return bool(self._pending)

    def stored(self, parent: int | None, block_hashes: list[int], sequence_hashes: list[int]) -> None:
        """A chain of blocks below `parent`."""
        last = self._pending[-1] if self._pending else None
        if not isinstance(last, StoredRun) or last.sequence_hashes[-1] != parent:
            last = StoredRun(parent)
            self._pending.append(last)
        last.block_hashes += block_hashes
        last.sequence_hashes += sequence_hashes

    def removed(self, sequence_hash: int) -> None:
        last = self._pending[-1] if self._pending else None
        if not isinstance(last, list):
            last = []
            self._pending.append(last)
        last.append(sequence_hash)

    def cleared(self, remaining: list[StoredRun]) -> None:
        """Replaces the pending events by a `Cleared`, and by the runs that remain cached."""
        self._pending = [Cleared(), *remaining]

    def take(self) -> list[KvEvent]:
        taken, self._pending = self._pending, []
        return [_event(entry) for entry in taken]


def _event(entry: StoredRun | list[int] | Cleared) -> KvEvent:
    if isinstance(entry, list):
        return Removed(_u64(entry))
    return entry.event() if isinstance(entry, StoredRun) else entry


def _u64(hashes: list[int]) -> bytes:
    return np.array(hashes, dtype="<u8").tobytes()
