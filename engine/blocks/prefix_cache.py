"""The prefix cache: in which home each cached block lies, and the order in which blocks are evicted.

The block manager counts references, and tells when a block comes to rest (nobody references it) or is reused.
Invariant: the parent of a referenced block is referenced. Hence a sequence's cached blocks are a prefix of its blocks.
Because the block manager drops a sequence's deepest block first, a block comes to rest after its children.

Because some blocks are reused more often than others, they age at different rates: see resting.py. Whoever reuses a
block reuses its parent, and the parent of a prompt's block is a prompt's. Hence a parent never ages faster than its
child, and the oldest resting block is a leaf.

Homes are ranges of block ids: ids below `num_blocks` are blocks of the device, the next ones are slots of host memory,
where the oldest blocks of the device move instead of being forgotten, and behind these are slots of the disk. All
blocks are one queue: a block stays in a lower tier while it is younger than those that come. Invariant: the parent of a
block has the same home or a nearer one. Hence a prefix lies on the device first, in host memory after that, and on the
disk last.

A block of any home may have a copy on the disk (disk_copies.py): disk_prefixes.py writes and reads these. A block
without a copy that leaves host memory is forgotten.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence as Run

from baton_proto.kv_events import DISK, KvEvent, Stored
from engine.blocks.disk_copies import DiskCopies
from engine.blocks.kept import Kept
from engine.blocks.kv_event_log import KvEventLog
from engine.blocks.lower_places import LowerPlaces
from engine.blocks.prefix_table import NOT_CACHED, PrefixTable
from engine.blocks.resting import KEPT, OUTPUT, REUSED, SHORT, Resting
from engine.sequences.sequence import Sequence


class PrefixCache:
    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        num_slots: int = 0,
        num_copies: int = 0,
        places: tuple[int, int] = (0, 0),
    ) -> None:
        """num_slots: of host memory; num_copies: of the disk; places: of these two, for layers with a window."""
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.first_copy = num_blocks + num_slots
        self.table = PrefixTable(block_size)
        self.copies = DiskCopies(range(self.first_copy, self.first_copy + num_copies))
        self.host_places = LowerPlaces(range(num_slots, num_slots + places[0]))
        self.disk_places = LowerPlaces(range(num_copies, num_copies + places[1]))
        self.kept = Kept(num_blocks + num_slots)
        self.num_resting = 0  # on the device
        self.moved_down: dict[int, int] = {}  # slot -> block whose content has to be copied there; the owner empties it
        self._resting = Resting()  # unreferenced blocks of the device
        self._lowered = Resting()  # blocks of host memory, but for those that move up
        self._stored = Resting()  # blocks of the disk, but for those that move up
        self._tiers = self._resting, self._lowered, self._stored  # by home
        self._free_slots = list(range(self.first_copy - 1, num_blocks - 1, -1))
        self._now = 0  # counts the blocks that came to rest
        self._log = KvEventLog()

    @property
    def num_lowered(self) -> int:
        """Blocks in host memory."""
        return len(self._lowered)

    def by_home(self, prefix: list[int]) -> tuple[list[int], list[int]]:
        """A prefix's blocks on the device, and those after them, in lower tiers."""
        num_here = num_before(prefix, self.num_blocks)
        return prefix[:num_here], prefix[num_here:]

    def insert(self, sequence: Sequence, first: int, kinds: bytes) -> int:
        """Caches blocks as PrefixTable.insert() does, and announces them."""
        num_new = self.table.insert(sequence, first, kinds)
        if num_new:
            parent, run = sequence.sequence_hashes[first - 1] if first else None, slice(first, first + num_new)
            self._log.stored(parent, sequence.block_hashes[run], sequence.sequence_hashes[run])
        return num_new

    def rest(self, blocks: list[int]) -> list[int]:
        """Blocks that nobody references any more, children first, come to rest. Returns those that are not cached."""
        kinds, places, resting, now = self.table.kinds, self.table.places, self._resting.by_kind, self._now
        strangers = []
        for block in blocks:
            if block < len(places) and places[block] != NOT_CACHED:
                now += 1
                resting[kinds[block]][block] = now
            else:
                strangers.append(block)
        self.num_resting += now - self._now
        self._now = now
        return strangers

    def reuse(self, blocks: list[int], num_resting: int) -> None:
        """A sequence found these blocks of the device, parents first, instead of computing them. The last `num_resting`
        rested; now they are referenced."""
        kinds, resting = self.table.kinds, self._resting.by_kind
        for block in blocks[len(blocks) - num_resting :]:
            del resting[kinds[block]][block]
        self._promote(blocks)
        self.num_resting -= num_resting

    def evict(self) -> int:
        """Takes the oldest resting block from the device, which is a leaf there, and returns it. Its content moves to
        host memory (see `moved_down`), or to its copy on the disk, or is forgotten."""
        age, kind = self._resting.oldest(self._now)
        block, at = self._resting.pop(kind)
        self.num_resting -= 1
        if self._make_slot(age):
            slot = self._free_slots.pop()
            self._move(block, slot)
            self._lowered.add(kind, slot, at)
            self.moved_down[slot] = block
        else:
            self._sink(block, kind, at)
        return block

    def _make_slot(self, age: float) -> bool:
        """Whether there is a free slot for a block of that age; the oldest block there gives up its slot. When both are
        as old, the lower tier's does, because it may be a child of the block that comes."""
        while not self._free_slots:
            if staged := self.copies.staged:
                self._release_slot(staged.pop(next(iter(staged))))
                continue
            oldest, kind = self._lowered.oldest(self._now)
            if oldest < age:
                return False
            self._give_up_slot(kind)
        return True

    def _give_up_slot(self, kind: int) -> None:
        """The oldest block of a kind leaves host memory. Its slot is free, unless it is being written."""
        slot, at = self._lowered.pop(kind)
        copy = self._sink(slot, kind, at)
        if copy is None or copy in self.copies.writes:
            self._release_slot(slot)
        else:
            self.copies.staged[copy] = slot

    def _sink(self, block: int, kind: int, at: int) -> int | None:
        """A block moves to its copy on the disk, or is forgotten. Invariant: without a copy it is a leaf."""
        copy = self.copies.of.get(self.table.sequence_hashes[block])
        if copy is None:
            self._log.removed(self._forget(block))
        else:
            self._move(block, copy)
            self._stored.add(kind, copy, at)
        return copy

    def keep(self, blocks: list[int]) -> None:
        """These blocks of lower tiers stay there until they are raised."""
        for block in blocks:
            del self._queue_of(block)[block]
            self.copies.hold(block)

    def raise_to(self, blocks: list[int], lowered: list[int]) -> None:
        """Blocks of lower tiers that were kept move into blocks of the device, which sequences reference, because they
        were asked for again."""
        for block, old in zip(blocks, lowered, strict=True):
            self._move(old, block)
            self._release_slot(old if old < self.first_copy else self.copies.unstage(old))
        self._promote(blocks)

    def _promote(self, blocks: list[int]) -> None:
        kinds = self.table.kinds
        for block in blocks:
            kinds[block] = REUSED[kinds[block]]
        if self.kept:
            for block in blocks:
                if kinds[block] == KEPT:
                    self.kept.reused(self.table.sequence_hashes[block])

    def retain(self, blocks: list[int], until_s: float) -> None:
        """Keeps these cached blocks until then: others are given up before them. blocks: a prefix, on the device, which
        a sequence references. When too many blocks are kept, only the first ones of the prefix are."""
        for block in blocks:
            if not self.kept.add(self.table.sequence_hashes[block], self.table.kinds[block], until_s):
                return
            self.table.kinds[block] = KEPT

    def drop(self, blocks: list[int]) -> None:
        """Nobody will ask for these cached blocks, children first, which a sequence references: they age as fast as
        any, up to the first that was reused or is kept."""
        for block in blocks:
            if self.table.kinds[block] > SHORT:
                return
            self.table.kinds[block] = OUTPUT

    def expire(self, now_s: float) -> None:
        """Blocks that were kept until now age from now on."""
        for sequence_hash, kind in self.kept.take_expired(now_s):
            block = self.table.block_of[sequence_hash]
            rested = self._queue_of(block).pop(block, None) is not None
            self.table.kinds[block] = kind
            if rested:
                self._now += 1
                self._queue_of(block)[block] = self._now

    def _release_slot(self, slot: int | None) -> None:
        if slot is not None and slot not in self.copies.sources:  # else it is free when it is written
            self.moved_down.pop(slot, None)
            self._free_slots.append(slot)

    def _home(self, block: int) -> int:
        """The home of a block id: DEVICE, HOST or DISK."""
        return (block >= self.num_blocks) + (block >= self.first_copy)

    def _queue_of(self, block: int) -> "OrderedDict[int, int]":
        return self._tiers[self._home(block)].by_kind[self.table.kinds[block]]

    def content(self, block: int) -> int | None:
        """Where in memory the content of a block lies; None: on the disk alone."""
        return block if block < self.first_copy else self.copies.content(block)

    def _move(self, old: int, new: int) -> None:
        self._log.moved(self.table.sequence_hashes[old], self._home(new))
        self.table.move(old, new)

    def clear(self) -> list[int]:
        """Forgets all resting blocks and the lower tiers. Returns those of the device. Referenced ones stay, and are
        announced again after the `Cleared`."""
        blocks, slots = self._resting.clear(), self._lowered.clear()
        for block in blocks + slots + self._stored.clear():
            self._forget(block)
        for slot in slots:
            self._release_slot(slot)
        for sequence_hash in list(self.copies.of):
            self.copies.drop(sequence_hash)
        self.host_places.clear()
        self.disk_places.clear()
        self.num_resting = 0
        self._log.cleared(self.table.runs(self._home))
        return blocks

    def take_events(self) -> list[KvEvent]:
        """The changes since the last call, in order."""
        return self._log.take()

    @property
    def has_events(self) -> bool:
        return bool(self._log)

    def runs(self) -> list[Stored]:
        """A snapshot of all cached blocks as chains, parents before children."""
        return [run.event() for run in self.table.runs(self._home)]

    def _forget(self, block: int) -> int:
        sequence_hash = self.table.forget(block)
        self.kept.discard(sequence_hash)
        self.host_places.drop(sequence_hash)
        self.disk_places.drop(sequence_hash)
        self._release_slot(self.copies.drop(sequence_hash))
        return sequence_hash

    def check_integrity(self, references: Run[int]) -> list[str]:
        """What is wrong with the books, in sentences. `references[block]`: how many sequences use a block."""
        return [
            *self.table.check_integrity(),
            *self._slot_problems(),
            *self._resting_problems(references),
            *self._order_problems(references),
        ]

    def _rested(self) -> dict[int, tuple[int, int]]:
        """Kind and time of each resting block, as the queues have them."""
        queues = [(kind, queue) for tier in self._tiers for kind, queue in enumerate(tier.by_kind)]
        return {block: (kind, at) for kind, queue in queues for block, at in queue.items()}

    def _resting_problems(self, references: Run[int]) -> Iterator[str]:
        kinds, cached, rested = self.table.kinds, set(self.table.block_of.values()), self._rested()
        if self.num_resting != len(self._resting):
            yield f"{self.num_resting} blocks should rest, {len(self._resting)} do"
        if sum(kind == KEPT and block in cached for block, kind in enumerate(kinds)) != len(self.kept):
            yield "other blocks are kept than are booked as kept"
        for block in self.table.block_of.values():
            users = references[block] if block < self.num_blocks else 0
            if (users == 0) != (block in rested):
                yield f"cached block {block} has {users} references, resting {block in rested}"
        for block, (kind, _) in rested.items():
            if block not in cached:
                yield f"resting block {block} is not cached"
            if kind != kinds[block]:
                yield f"block {block} rests in the wrong place"

    def _order_problems(self, references: Run[int]) -> Iterator[str]:
        """What is wrong between blocks and their parents."""
        kinds, with_copy, rested = self.table.kinds, self.copies.of, self._rested()
        for sequence_hash, block in self.table.block_of.items():
            above = self.table.parent_of(block)
            parent = None if above is None else self.table.block_of.get(above)
            if parent is None:
                continue
            if self._home(parent) > self._home(block):
                yield f"parent {parent} of block {block} lies in a lower tier"
            elif sequence_hash in with_copy and above not in with_copy:
                yield f"block {block} has a copy on the disk, and its parent {parent} has none"
            elif block < self.num_blocks and references[block] and not references[parent]:
                yield f"parent {parent} of referenced block {block} is not referenced"
            elif kinds[parent] < kinds[block]:
                yield f"block {block} grows old more slowly than its parent {parent}"
            elif kinds[parent] < KEPT and parent in rested and rested[parent][1] < rested.get(block, (0, 0))[1]:
                yield f"block {block} would be evicted after its parent {parent}"

    def _slot_problems(self) -> list[str]:
        copies = self.copies
        problems = copies.check_integrity()
        slots = range(self.num_blocks, self.num_blocks + self.num_slots)
        in_use = {
            *copies.staged.values(),
            *copies.held.values(),
            *(slot for slot, _ in copies.reads.values()),
            *copies.sources,
        }
        if sorted([*self._free_slots, *in_use.difference(self._lowered), *self._lowered]) != list(slots):
            problems.append("the slots of host memory are not those that are free, hold a block or are being used")
        if strange := copies.of.keys() - self.table.block_of.keys():
            problems.append(f"{len(strange)} copies are of blocks that are not cached")
        problems.extend(
            f"block {block} lies on the disk without being its block's copy"
            for sequence_hash, block in self.table.block_of.items()
            if self._home(block) == DISK and copies.of.get(sequence_hash) != block
        )
        return problems + [f"a copy to slot {slot} was not made" for slot in self.moved_down]


def num_before(prefix: list[int], first_id: int) -> int:
    """How many of a prefix's blocks have ids below `first_id`: the first ones, see homes."""
    return bisect_left(prefix, True, key=lambda block: block >= first_id)
