"""Traffic between the tiers of what blocks hold in layers with a window: the part that has a place of its own.

The part goes to host memory when its block leaves the device or another takes its place, and to the disk when its
block is written, or has a copy there already. It stays where it is while its block moves. A sequence needs it of the
blocks that its next token sees, and of no others: it comes back to a place of the device, from wherever it is nearest.
"""

from collections.abc import Container, Iterable
from itertools import chain

from engine.blocks.disk_copies import DiskTier, Done
from engine.blocks.disk_prefixes import DiskPrefixCache
from engine.blocks.window_blocks import WindowBlocks
from engine.sequences.sequence import Sequence


class WindowTraffic:
    """Engine thread only."""

    def __init__(self, cache: DiskPrefixCache, windows: WindowBlocks, disk: DiskTier | None) -> None:
        self._cache = cache
        self._windows = windows
        self._disk = disk
        self._host_places, self._disk_places = cache.host_places, cache.disk_places
        self._writes: dict[int, tuple[int, int]] = {}  # place on the disk -> (in host memory, sequence hash)
        self._reads: dict[int, tuple[int, int]] = {}  # likewise
        self._lowered: list[int] = []  # hashes of blocks whose part has come to host memory; write() empties it
        self._wanted: dict[Sequence, dict[int, int | None]] = {}  # who waits -> hash -> place in host memory it holds

    def usable(self, hits: list[int], *, on_disk: bool = False) -> list[int]:
        """The longest part of a cached prefix behind which a token finds all that it sees, in memory or also on the
        disk."""
        host, disk = self._host_places.of, self._disk_places.of if on_disk else ()
        return hits[: self._windows.num_usable(hits, host, disk)]

    # --- between the device and the lower tier ------------------------------------------------------------------------

    def lower(self, blocks: Iterable[int]) -> dict[int, int]:
        """Books places in host memory for blocks of the device that are copied there. Returns (place there -> id of the
        place on the device) to copy. Blocks in the midst of a prompt get those alone that nobody has."""
        table, host = self._cache.table, self._host_places
        copies: dict[int, int] = {}
        for block in blocks:
            sequence_hash = table.sequence_hashes[block]
            place = self._windows.id_of(block)
            if place is None or sequence_hash in host.of or sequence_hash not in table.block_of:
                continue
            target = host.claim(must_be_free=self._windows.is_passed(block))
            if target is not None:
                host.put(sequence_hash, target)
                copies[target] = place
                if self._disk is not None:
                    self._lowered.append(sequence_hash)
        return copies

    def hold(self, hits: list[int], held: range) -> dict[int, int]:
        """See TierTraffic.hold_places()."""
        hashes = self._cache.table.sequence_hashes
        missing = [at for at in held if at < len(hits) and self._windows.id_of(hits[at]) is None]
        return {at: self._host_places.hold(hashes[hits[at]]) for at in missing}

    def release(self, sequence: Sequence, held: dict[int, int]) -> None:
        for at, place in held.items():
            self._host_places.let_go(sequence.sequence_hashes[at], place)

    # --- from and to the disk -----------------------------------------------------------------------------------------

    def write(self) -> None:
        """Begins to write this part of blocks that are about to be written, and of those that have a copy and whose
        part has come to host memory now."""
        assert self._disk is not None
        copies, table = self._cache.copies, self._cache.table
        blocks = {block.sequence_hash: block for _, _, block in copies.to_write}
        lowered, self._lowered = self._lowered, []
        for one in lowered:
            if one in copies.of and one in table.block_of:
                blocks.setdefault(one, self._cache.stored_block(table.block_of[one]))
        for one, block in blocks.items():
            if one not in self._host_places.of or one in self._disk_places.of:
                continue
            if (target := self._disk_places.claim()) is None:
                return
            self._disk_places.put(one, target)
            self._disk_places.hold(one)
            self._writes[target] = self._host_places.hold(one), one
            self._disk.write(self._writes[target][0], target, block)

    def num_unread(self, hits: list[int]) -> int:
        """How many of a prefix's blocks that its next token sees have this part on the disk alone."""
        host, hashes = self._host_places.of, self._cache.table.sequence_hashes
        return sum(hashes[one] not in host for one in self._windows.missing(hits))

    def fetch(self, sequence: Sequence, hits: list[int]) -> None:
        """Begins to read what num_unread() counts, and keeps all that the next token sees for the sequence."""
        assert self._disk is not None
        wanted = self._wanted.setdefault(sequence, {})
        reading = {one for _, one in self._reads.values()}
        table = self._cache.table
        missing = [table.sequence_hashes[block] for block in self._windows.missing(hits)]
        for one in missing:  # before places are claimed, which may be these
            if wanted.setdefault(one, None) is None and one in self._host_places.of:
                wanted[one] = self._host_places.hold(one)
        for one in missing:
            is_there = wanted[one] is not None or one in reading or one not in self._disk_places.of
            if not is_there and (target := self._host_places.claim()) is not None:
                source = self._disk_places.hold(one)
                self._reads[source] = target, one
                self._disk.read(source, target, self._cache.stored_block(table.block_of[one]))

    def num_reading(self, sequence: Sequence) -> int:
        """How many reads a sequence waits for."""
        wanted: Container[int] = self._wanted.get(sequence, ())
        return sum(one in wanted for _, one in self._reads.values())

    def forgo(self, sequence: Sequence) -> None:
        """The sequence does not wait for the disk any more."""
        for one, place in self._wanted.pop(sequence, {}).items():
            if place is not None:
                self._host_places.let_go(one, place)

    def landed(self, done: Done) -> None:
        """A read or write of a place on the disk has ended."""
        at = done.copy
        in_host, one = (self._writes if done.written else self._reads).pop(at)
        is_known = self._disk_places.of.get(one) == at
        if is_known and not done.ok:
            self._disk_places.drop(one)
        self._disk_places.let_go(one, at)
        if done.written:
            self._host_places.let_go(one, in_host)
        elif not (is_known and done.ok) or one in self._host_places.of:
            self._host_places.give_back(in_host)
        else:
            self._host_places.put(one, in_host)
            for wanted in self._wanted.values():
                if one in wanted and wanted[one] is None:
                    wanted[one] = self._host_places.hold(one)

    def check_integrity(self) -> Iterable[str]:
        """What is wrong with the books, in sentences."""
        cached = self._cache.table.block_of
        places = self._host_places.check_integrity(cached), self._disk_places.check_integrity(cached)
        return chain.from_iterable(places)
