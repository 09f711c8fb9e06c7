"""The prefix cache's blocks on their way to the disk and back.

The oldest blocks of host memory are copied and move to the disk before their slots are needed, which keep the content
until then. A block comes back through such a slot, into which its copy is read while its home is still the disk.
"""

from collections.abc import Iterable, Mapping
from heapq import merge
from operator import itemgetter

from baton_proto.kv_events import DISK
from engine.blocks.disk_copies import DiskBlock
from engine.blocks.prefix_cache import PrefixCache
from engine.blocks.resting import KEPT

RESERVE = 2  # of so many host slots, one can be had at once for a block of the device, because its own is on the disk


class DiskPrefixCache(PrefixCache):
    """A PrefixCache whose blocks may have copies on the disk."""

    def write_behind(self, max_writes: int) -> None:
        """Begins to write the oldest blocks of host memory, and those above them that have no copy, until enough slots
        can be had at once. What has a copy moves there. Blocks of the device are copied to free slots first."""
        copies = self.copies
        while len(copies.writes) < max_writes:
            leaving = sum(not self.table.holds(source) for source in copies.sources)
            age, kind = self._lowered.oldest(self._now)
            if age < 0 or (len(self._free_slots) + len(copies.staged) + leaving) * RESERVE >= self.num_slots:
                return
            for block in self.table.path_below(copies.of, next(iter(self._lowered.by_kind[kind]))):
                if len(copies.writes) == max_writes or block in copies.sources or not self._make_copy(age):
                    return  # a source without a copy: a write that does not count any more has not ended
                if block < self.num_blocks:
                    if not self._free_slots and not copies.staged:
                        break  # the block without a copy is forgotten, and its slot serves those above it
                    self._make_slot(age)
                self._begin_write(block)
            self._give_up_slot(kind)

    def write_all(self, max_writes: int) -> None:
        """Begins to write blocks that have no copy, those that would be given up last first, while the disk has room or
        older blocks. Slots for blocks of the device are those that are free, and those of blocks that have a copy."""
        if self._write_youngest(max_writes) or self.copies.writes:
            return
        kind = self._lowered.oldest(self._now)[1]
        if self._lowered.by_kind[kind]:  # one without a copy is forgotten, and its slot serves those above it
            self._give_up_slot(kind)
            self._write_youngest(max_writes)

    def _write_youngest(self, max_writes: int) -> bool:
        """Returns False when a slot is missing."""
        copies = self.copies
        queues = self._resting.youngest(self._now), self._lowered.youngest(self._now)
        for age, leaf in merge(*queues, key=itemgetter(0)):
            for block in self.table.path_below(copies.of, leaf):
                if len(copies.writes) >= max_writes or block in copies.sources or not self._make_copy(age):
                    return True
                if block < self.num_blocks and not self._spare_slot():
                    return False
                self._begin_write(block)
        return True

    def _spare_slot(self) -> bool:
        """Whether there is a free slot; blocks of host memory move to their copies for it, the oldest first."""
        while not self._free_slots and not self.copies.staged:
            queue = self._lowered.by_kind[kind := self._lowered.oldest(self._now)[1]]
            if not queue or self.table.sequence_hashes[next(iter(queue))] not in self.copies.of:
                return False
            self._give_up_slot(kind)
        return self._make_slot(0)

    def _begin_write(self, block: int) -> None:
        """A block of the device is copied to a free slot first."""
        source = block
        if block < self.num_blocks:
            source = self._free_slots.pop()
            self.moved_down[source] = block
        self.copies.begin_write(source, self.stored_block(block))

    def _make_copy(self, age: float) -> bool:
        """Whether there is a free copy; blocks of the disk of at least that age are forgotten for it."""
        while not self.copies.free:
            oldest, kind = self._stored.oldest(self._now)
            if oldest < age:
                return False
            self._log.removed(self._forget(self._stored.pop(kind)[0]))
        return True

    def written(self, copy: int, ok: bool) -> None:
        """A write has ended. After a failure none of those on their way counts: their parents may be missing."""
        copies = self.copies
        source, sequence_hash = copies.end_write(copy)
        if ok and self.table.holds(copy):
            copies.staged[copy] = source
        elif not self.table.holds(source):
            self._free_slots.append(source)
        if ok:
            return
        later = [(hash_, at) for at, (_, hash_) in copies.writes.items()]
        for lost, at in reversed([(sequence_hash, copy), *later]):  # children first
            if copies.of.get(lost) != at:
                continue
            if self.table.block_of[lost] == at:
                self._lose(at)
            else:
                copies.drop(lost)

    @property
    def num_fetchable(self) -> int:
        """How many more blocks of the disk may have host slots."""
        return max(0, max(1, self.num_slots // 2) - len(self.copies.reads) - len(self.copies.held))

    def fetch(self, blocks: list[int]) -> None:
        """Begins to read these blocks of the disk, parents first, as long as they get host slots: at most half of them,
        from the oldest blocks there."""
        copies = self.copies
        for block in blocks:
            if block in copies.reads:
                continue
            if not self.num_fetchable or not self._make_slot(0):
                return
            copies.begin_read(block, self._free_slots.pop(), self.stored_block(block))

    def was_read(self, copy: int, ok: bool) -> None:
        """A read has ended. A block that could not be read is forgotten, and so are all below it."""
        target = self.copies.end_read(copy)
        if ok and self.table.holds(copy) and self.content(copy) is None:
            self.copies.staged[copy] = target
            return
        self._free_slots.append(target)
        if self.table.holds(copy) and not ok:
            lost = [copy]
            for one in lost:
                lost += self.table.children_of(one, self.first_copy)
            for one in reversed(lost):
                self._lose(one)

    def _lose(self, copy: int) -> None:
        """Forgets a leaf that lies on the disk."""
        self._queue_of(copy).pop(copy)
        self._log.removed(self._forget(copy))

    def stored_block(self, block: int) -> DiskBlock:
        """What is stored with the block's KV."""
        kind = self.kept.kind(self.table.sequence_hashes[block], self.table.kinds[block])
        return self.table.stored(block, kind)

    def adopt(self, found: Iterable[tuple[int, DiskBlock]]) -> None:
        """Takes in copies that an earlier process wrote, the youngest first, but for those whose parents are missing.
        Ids behind those of the copies are of parts that have a place. Called on an empty cache."""
        known: dict[int, tuple[int, DiskBlock]] = {}
        places: list[tuple[int, int]] = []
        for copy, block in found:
            if copy >= self.copies.all.stop:
                places.append((block.sequence_hash, copy - self.first_copy))
            else:
                known.setdefault(block.sequence_hash, (copy, block))
        placed = _with_parents(known)
        self.table.grow(self.first_copy + len(self.copies.all))
        for sequence_hash in placed:
            copy, block = known[sequence_hash]
            self.copies.of[sequence_hash] = copy
            self.table.put(copy, block, min(block.kind, KEPT - 1))
            self._log.stored(block.parent, [block.block_hash], [sequence_hash], DISK)
        kinds = self.table.kinds
        for sequence_hash in reversed(placed):  # children first, as they come to rest
            copy, block = known[sequence_hash]
            self._now += 1
            self._stored.by_kind[kinds[copy]][copy] = self._now
            if block.parent is not None:
                parent = self.table.block_of[block.parent]
                kinds[parent] = max(kinds[parent], kinds[copy])
        taken = set(self.copies.of.values())
        self.copies.free = [copy for copy in self.copies.free if copy not in taken]
        self.disk_places.adopt((one, place) for one, place in places if one in self.copies.of)


def _with_parents(known: Mapping[int, tuple[int, DiskBlock]]) -> list[int]:
    """Sequence hashes of the known blocks whose parents are all known, parents first."""
    placed: dict[int, None] = {}
    lost: set[int] = set()
    for sequence_hash in known:
        path: dict[int, None] = {}
        above: int | None = sequence_hash
        while above is not None and above in known and not (above in placed or above in lost or above in path):
            path[above] = None
            above = known[above][1].parent
        if above is None or above in placed:
            placed |= dict.fromkeys(reversed(path))
        else:
            lost |= path.keys()
    return list(placed)
