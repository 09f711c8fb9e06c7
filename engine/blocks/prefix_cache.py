"""Which blocks hold which prefix: computed blocks by sequence hash, and the order in which they are evicted.

The block manager counts references, and tells when a block comes to rest (nobody references it) or is reused.
Invariant: the parent of a cached block is cached. Invariant: the parent of a referenced block is referenced. Hence a
sequence's cached blocks are a prefix of its blocks. Because the block manager drops a sequence's deepest block first, a
block comes to rest after its children.

Invariant: a hit has the same tokens, the same parent and the same hash seed as the sequence that takes it, because
hashes can be made to collide. Of two prefixes with one hash, the first one is cached while it stays.

Because some blocks are reused more often than others, they age at different rates: see resting.py. Whoever reuses a
block reuses its parent, and the parent of a prompt's block is a prompt's. Hence a parent never ages faster than its
child, and the oldest resting block is a leaf.

Blocks have homes: ids below `num_blocks` are blocks of the device, those from there on are slots of host memory, where
the oldest blocks of the device move instead of being forgotten, and behind these are slots of the disk. All blocks are
one queue: a block stays in a lower tier while it is younger than those that come. Invariant: the parent of a block has
the same home or a nearer one. Hence a prefix lies on the device first, in host memory after that, and on the disk last.

A block of any home may have a copy on the disk (disk_copies.py): disk_prefixes.py writes and reads these. A block
without a copy that leaves host memory is forgotten.
"""

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence as Run
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from baton_proto.kv_events import DISK, KvEvent, Stored
from engine.blocks.disk_copies import DiskCopies
from engine.blocks.kept import Kept
from engine.blocks.kv_event_log import KvEventLog, StoredRun
from engine.blocks.resting import KEPT, OUTPUT, REUSED, SHORT, Resting
from engine.sequences.sequence import Sequence

_MISSING = -1
NOT_CACHED, ROOT, CHILD = range(3)  # what a block is


class PrefixCache:
    """Arrays are indexed by block id. They grow with the highest block ever cached, so an idle pool costs nothing."""

    def __init__(self, block_size: int, num_blocks: int, num_slots: int = 0, num_copies: int = 0) -> None:
        self.num_blocks = num_blocks
        self.num_slots = num_slots  # of host memory
        self._block_size = block_size
        self._block_of: dict[int, int] = {}  # sequence hash -> block; parents were inserted before their children
        self._places = bytearray()  # NOT_CACHED, ROOT or CHILD
        self._parents = array("Q")  # sequence hash of the parent of a CHILD
        self._block_hashes = array("Q")
        self._sequence_hashes = array("Q")
        self._tokens = np.empty((0, block_size), dtype=np.uint32)
        self._seeds: dict[int, int] = {}  # hash seeds, of blocks without a parent
        self._kinds = bytearray()  # by block id
        self._resting = Resting()  # unreferenced blocks of the device
        self._lowered = Resting()  # blocks of host memory, but for those that move up
        self._stored = Resting()  # blocks of the disk, but for those that move up
        self._free_slots = list(range(num_blocks + num_slots - 1, num_blocks - 1, -1))
        self._now = 0  # counts the blocks that came to rest
        self.num_resting = 0  # on the device
        self.moved_down: dict[int, int] = {}  # slot -> block whose content has to be copied there; the owner empties it
        self.kept = Kept(num_blocks + num_slots)
        self.first_copy = num_blocks + num_slots
        self.copies = DiskCopies(range(self.first_copy, self.first_copy + num_copies))
        self.num_collisions = 0  # looks at a prefix that met another's block under its hash
        self._log = KvEventLog()

    def __len__(self) -> int:
        return len(self._block_of)

    @property
    def num_lowered(self) -> int:
        """Blocks in host memory."""
        return len(self._lowered)

    def match(self, sequence: Sequence, first: int, end: int) -> list[int]:
        """The cached blocks that hold the sequence's blocks [first, ...), `end` excluded. Those before `first` are
        cached, and stand in its block table."""
        block_of, hashes = self._block_of, sequence.sequence_hashes
        end = bisect_left(range(end), True, lo=first, key=lambda i: hashes[i] not in block_of)
        if end == first:
            return []
        blocks = list(map(block_of.get, hashes[first:end], repeat(_MISSING)))
        num_equal = self._num_equal(sequence, first, np.frombuffer(array("i", blocks), np.int32))
        self.num_collisions += num_equal < len(blocks)
        return blocks[:num_equal]

    def _num_equal(self, sequence: Sequence, first: int, blocks: NDArray[np.int32]) -> int:
        """How many of the blocks follow each other from the sequence's block `first` on, and hold its tokens."""
        if not first and self._seeds.get(int(blocks[0])) != sequence.hash_seed:
            return 0
        above = np.roll(np.frombuffer(self._sequence_hashes, np.uint64)[blocks], 1)
        above[0] = sequence.sequence_hashes[first - 1] if first else 0
        strange = (np.frombuffer(self._parents, np.uint64)[blocks] != above) | (blocks < 0)
        strange |= np.frombuffer(self._places, np.uint8)[blocks] != CHILD
        strange[0] &= first > 0
        tokens = sequence.block_tokens(first, first + len(blocks), self._block_size)
        others = self._tokens.take(blocks, 0) != tokens
        if not (others.any() or strange.any()):
            return len(blocks)
        return int((others.any(1) | strange).argmax())

    def holds(self, block: int) -> bool:
        return block < len(self._places) and self._places[block] != NOT_CACHED

    def insert(self, sequence: Sequence, first: int, kinds: bytes) -> int:
        """Caches the sequence's blocks from `first` on, one for each of `kinds`. Their KV is computed, those before
        are cached, and match() has found none of them. Returns how many were cached: a block whose hash is taken stays
        out, and so do those after it."""
        run = slice(first, first + len(kinds))
        blocks, hashes = sequence.block_table[run], sequence.sequence_hashes[run]
        self._grow(max(blocks) + 1)
        parent = above = sequence.sequence_hashes[first - 1] if first else None
        num_new = 0
        for block, block_hash, sequence_hash, kind in zip(
            blocks, sequence.block_hashes[run], hashes, kinds, strict=True
        ):
            if self._block_of.setdefault(sequence_hash, block) != block:
                break
            self._places[block] = ROOT if above is None else CHILD
            self._parents[block] = above or 0
            self._block_hashes[block] = block_hash
            self._sequence_hashes[block] = sequence_hash
            self._kinds[block] = kind
            above = sequence_hash
            num_new += 1
        if num_new:
            # Because numpy takes ten times as long for a list of one, and an answer's blocks come one by one:
            self._tokens[blocks[:num_new] if num_new > 1 else blocks[0]] = sequence.block_tokens(
                first, first + num_new, self._block_size
            )
            if not first:
                self._seeds[blocks[0]] = sequence.hash_seed
            self._log.stored(parent, sequence.block_hashes[first : first + num_new], hashes[:num_new])
        return num_new

    def _grow(self, num_blocks: int) -> None:
        """Makes room for block ids below `num_blocks`."""
        missing = num_blocks - len(self._places)
        if missing > 0:
            self._places.extend(bytes(missing))
            self._parents.extend([0] * missing)
            self._block_hashes.extend([0] * missing)
            self._sequence_hashes.extend([0] * missing)
            self._kinds.extend(bytes(missing))
        if num_blocks > len(self._tokens):
            grown = np.empty((max(num_blocks, 2 * len(self._tokens)), self._block_size), dtype=np.uint32)
            grown[: len(self._tokens)] = self._tokens
            self._tokens = grown

    def rest(self, blocks: list[int]) -> list[int]:
        """Blocks that nobody references any more, children first, come to rest. Returns those that are not cached."""
        kinds, places, resting, now = self._kinds, self._places, self._resting.by_kind, self._now
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
        kinds, resting = self._kinds, self._resting.by_kind
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
        copy = self.copies.of.get(self._sequence_hashes[block])
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
        kinds = self._kinds
        for block in blocks:
            kinds[block] = REUSED[kinds[block]]
        if self.kept:
            for block in blocks:
                if kinds[block] == KEPT:
                    self.kept.reused(self._sequence_hashes[block])

    def retain(self, blocks: list[int], until_s: float) -> None:
        """Until then, these cached blocks are given up after those that nobody asked to keep. blocks: a prefix, on the
        device; a sequence references them. When too many are kept, only the first ones are."""
        for block in blocks:
            if not self.kept.add(self._sequence_hashes[block], self._kinds[block], until_s):
                return
            self._kinds[block] = KEPT

    def drop(self, blocks: list[int]) -> None:
        """Nobody will ask for these cached blocks, children first, which a sequence references: they age as fast as
        any, up to the first that was reused or is kept."""
        for block in blocks:
            if self._kinds[block] > SHORT:
                return
            self._kinds[block] = OUTPUT

    def expire(self, now_s: float) -> None:
        """Blocks that were kept until now age from now on."""
        for sequence_hash, kind in self.kept.take_expired(now_s):
            block = self._block_of[sequence_hash]
            rested = self._queue_of(block).pop(block, None) is not None
            self._kinds[block] = kind
            if rested:
                self._now += 1
                self._queue_of(block)[block] = self._now

    def _release_slot(self, slot: int | None) -> None:
        if slot is not None and slot not in self.copies.sources:  # else it is free when it is written
            self.moved_down.pop(slot, None)
            self._free_slots.append(slot)

    def _home(self, block: int) -> int:
        """Of a block id: DEVICE, HOST or DISK."""
        return (block >= self.num_blocks) + (block >= self.first_copy)

    def _queue_of(self, block: int) -> "OrderedDict[int, int]":
        return (self._resting, self._lowered, self._stored)[self._home(block)].by_kind[self._kinds[block]]

    def content(self, block: int) -> int | None:
        """Where in memory the content of a block lies; None: on the disk alone."""
        return block if block < self.first_copy else self.copies.content(block)

    def _move(self, old: int, new: int) -> None:
        self._grow(new + 1)
        self._log.moved(self._sequence_hashes[old], self._home(new))
        self._block_of[self._sequence_hashes[old]] = new
        for column in (self._places, self._parents, self._block_hashes, self._sequence_hashes, self._kinds):
            column[new] = column[old]
        self._tokens[new] = self._tokens[old]
        self._places[old] = NOT_CACHED
        if old in self._seeds:
            self._seeds[new] = self._seeds.pop(old)

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
        self.num_resting = 0
        self._log.cleared(self._runs())
        return blocks

    def take_events(self) -> list[KvEvent]:
        return self._log.take()

    @property
    def has_events(self) -> bool:
        return bool(self._log)

    def runs(self) -> list[Stored]:
        """All cached blocks as chains, parents before children."""
        return [run.event() for run in self._runs()]

    def _runs(self) -> list[StoredRun]:
        runs: list[StoredRun] = []
        run_ending_at: dict[tuple[int | None, int], StoredRun] = {}  # sequence hash, home -> the run that it ends
        for sequence_hash, block in self._block_of.items():
            parent, home = self._parent_of(block), self._home(block)
            run = run_ending_at.pop((parent, home), None)
            if run is None:
                run = StoredRun(parent, home)
                runs.append(run)
            run.block_hashes.append(self._block_hashes[block])
            run.sequence_hashes.append(sequence_hash)
            run_ending_at[sequence_hash, home] = run
        return runs

    def _parent_of(self, block: int) -> int | None:
        """Sequence hash of its parent."""
        return self._parents[block] if self._places[block] == CHILD else None

    def _forget(self, block: int) -> int:
        sequence_hash = self._sequence_hashes[block]
        del self._block_of[sequence_hash]
        self.kept.discard(sequence_hash)
        if self._places[block] == ROOT:
            del self._seeds[block]
        self._places[block] = NOT_CACHED
        self._release_slot(self.copies.drop(sequence_hash))
        return sequence_hash

    def check_integrity(self, references: Run[int]) -> list[str]:
        """What is wrong with the books, in sentences. `references[block]`: how many sequences use a block."""
        problems = []
        cached = set(self._block_of.values())
        if len(cached) != len(self._block_of):
            problems.append("two sequence hashes name one block")
        held = {block for block, place in enumerate(self._places) if place != NOT_CACHED}
        if held != cached:
            problems.append(f"blocks {sorted(held ^ cached)} are cached by one account only")
        if self._seeds.keys() != {block for block in held if self._places[block] == ROOT}:
            problems.append("hash seeds are kept of other blocks than those without a parent")
        if self.num_resting != len(self._resting):
            problems.append(f"{self.num_resting} blocks should rest, {len(self._resting)} do")
        rested = {
            block: (kind, at)
            for tier in (self._resting, self._lowered, self._stored)
            for kind, resting in enumerate(tier.by_kind)
            for block, at in resting.items()
        }
        problems += self._slot_problems()
        if sum(kind == KEPT and block in cached for block, kind in enumerate(self._kinds)) != len(self.kept):
            problems.append("other blocks are kept than are booked as kept")
        for sequence_hash, block in self._block_of.items():
            if self._sequence_hashes[block] != sequence_hash:
                problems.append(f"block {block} is filed under a foreign hash")
            users = references[block] if block < self.num_blocks else 0
            if (users == 0) != (block in rested):
                problems.append(f"cached block {block} has {users} references, resting {block in rested}")
            above = self._parent_of(block)
            if above is None:
                continue
            parent = self._block_of.get(above)
            if parent is None:
                problems.append(f"the parent of cached block {block} is not cached")
            elif self._home(parent) > self._home(block):
                problems.append(f"parent {parent} of block {block} lies in a lower tier")
            elif sequence_hash in self.copies.of and above not in self.copies.of:
                problems.append(f"block {block} has a copy on the disk, and its parent {parent} has none")
            elif users and not references[parent]:
                problems.append(f"parent {parent} of referenced block {block} is not referenced")
            elif self._kinds[parent] < self._kinds[block]:
                problems.append(f"block {block} grows old more slowly than its parent {parent}")
            elif self._kinds[parent] < KEPT and parent in rested and rested[parent][1] < rested.get(block, (0, 0))[1]:
                problems.append(f"block {block} would be evicted after its parent {parent}")
        problems.extend(f"resting block {block} is not cached" for block in rested if block not in cached)
        problems.extend(
            f"block {block} rests in the wrong place"
            for block, (kind, _) in rested.items()
            if kind != self._kinds[block]
        )
        return problems

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
        if strange := copies.of.keys() - self._block_of.keys():
            problems.append(f"{len(strange)} copies are of blocks that are not cached")
        problems.extend(
            f"block {block} lies on the disk without being its block's copy"
            for sequence_hash, block in self._block_of.items()
            if self._home(block) == DISK and copies.of.get(sequence_hash) != block
        )
        return problems + [f"a copy to slot {slot} was not made" for slot in self.moved_down]
