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

Blocks have homes: ids below `num_blocks` are blocks of the device, those from there on are slots of a lower tier, where
the oldest blocks of the device move instead of being forgotten. All blocks of both tiers are one queue: a block stays
in the lower tier while it is younger than those that come. Invariant: the parent of a block of the device lies on the
device. Hence a prefix lies on the device first and in the lower tier after that.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence as Run
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from baton_proto.kv_events import KvEvent, Stored
from engine.core.kv_event_log import KvEventLog, StoredRun
from engine.core.resting import REUSED, Resting
from engine.core.sequence import Sequence

_MISSING = -1
NOT_CACHED, ROOT, CHILD = range(3)  # what a block is


class PrefixCache:
    """Arrays are indexed by block id. They grow with the highest block ever cached, so an idle pool costs nothing."""

    def __init__(self, block_size: int, num_blocks: int, num_slots: int = 0) -> None:
        self.num_blocks = num_blocks
        self.num_slots = num_slots  # of the lower tier
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
        self._lowered = Resting()  # blocks of the lower tier, but for those that move up
        self._free_slots = list(range(num_blocks + num_slots - 1, num_blocks - 1, -1))
        self._now = 0  # counts the blocks that came to rest
        self.num_resting = 0  # on the device
        self.moved_down: dict[int, int] = {}  # slot -> block whose content has to be copied there; the owner empties it
        self.num_collisions = 0  # looks at a prefix that met another's block under its hash
        self._log = KvEventLog()

    def __len__(self) -> int:
        return len(self._block_of)

    @property
    def num_lowered(self) -> int:
        """Blocks in the lower tier."""
        return self.num_slots - len(self._free_slots)

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
        for block in blocks:
            kinds[block] = REUSED[kinds[block]]
        self.num_resting -= num_resting

    def evict(self) -> int:
        """Takes the oldest resting block from the device, which is a leaf there, and returns it. Its content moves to
        the lower tier (see `moved_down`), or is forgotten."""
        age, kind = self._resting.oldest(self._now)
        block, at = self._resting.pop(kind)
        self.num_resting -= 1
        if self._make_slot(age):
            slot = self._free_slots.pop()
            self._move(block, slot)
            self._lowered.by_kind[kind][slot] = at
            self.moved_down[slot] = block
        else:
            self._log.removed(self._forget(block))
        return block

    def _make_slot(self, age: float) -> bool:
        """Whether there is a free slot for a block of that age; the oldest block there is forgotten for it. When both
        are as old, the lower tier's is, because it may be a child of the block that comes."""
        if not self._free_slots:
            oldest, kind = self._lowered.oldest(self._now)
            if oldest < age:
                return False
            slot, _ = self._lowered.pop(kind)
            self._log.removed(self._forget(slot))
            self._release_slot(slot)
        return True

    def keep(self, slots: list[int]) -> None:
        """These blocks of the lower tier stay there until they are raised."""
        for slot in slots:
            del self._lowered.by_kind[self._kinds[slot]][slot]

    def raise_to(self, blocks: list[int], slots: list[int], *, reused: bool) -> None:
        """Blocks of the lower tier that were kept move into blocks of the device, which sequences reference. reused:
        their content was not computed anew."""
        for block, slot in zip(blocks, slots, strict=True):
            self._move(slot, block)
            if reused:
                self._kinds[block] = REUSED[self._kinds[block]]
            self._release_slot(slot)

    def _release_slot(self, slot: int) -> None:
        self.moved_down.pop(slot, None)
        self._free_slots.append(slot)

    def _move(self, old: int, new: int) -> None:
        self._grow(new + 1)
        self._block_of[self._sequence_hashes[old]] = new
        for column in (self._places, self._parents, self._block_hashes, self._sequence_hashes, self._kinds):
            column[new] = column[old]
        self._tokens[new] = self._tokens[old]
        self._places[old] = NOT_CACHED
        if old in self._seeds:
            self._seeds[new] = self._seeds.pop(old)

    def clear(self) -> list[int]:
        """Forgets all resting blocks and the lower tier. Returns those of the device. Referenced ones stay, and are
        announced again after the `Cleared`."""
        blocks, slots = self._resting.clear(), self._lowered.clear()
        for block in blocks + slots:
            self._forget(block)
        for slot in slots:
            self._release_slot(slot)
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
        run_ending_at: dict[int | None, StoredRun] = {}  # sequence hash -> the run that it ends
        for sequence_hash, block in self._block_of.items():
            parent = self._parent_of(block)
            run = run_ending_at.pop(parent, None)
            if run is None:
                run = StoredRun(parent)
                runs.append(run)
            run.block_hashes.append(self._block_hashes[block])
            run.sequence_hashes.append(sequence_hash)
            run_ending_at[sequence_hash] = run
        return runs

    def _parent_of(self, block: int) -> int | None:
        """Sequence hash of its parent."""
        return self._parents[block] if self._places[block] == CHILD else None

    def _forget(self, block: int) -> int:
        sequence_hash = self._sequence_hashes[block]
        del self._block_of[sequence_hash]
        if self._places[block] == ROOT:
            del self._seeds[block]
        self._places[block] = NOT_CACHED
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
            for tier in (self._resting, self._lowered)
            for kind, resting in enumerate(tier.by_kind)
            for block, at in resting.items()
        }
        problems += self._slot_problems()
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
            elif parent >= self.num_blocks > block:
                problems.append(f"parent {parent} of block {block} of the device is not there")
            elif users and not references[parent]:
                problems.append(f"parent {parent} of referenced block {block} is not referenced")
            elif self._kinds[parent] < self._kinds[block]:
                problems.append(f"block {block} grows old more slowly than its parent {parent}")
            elif parent in rested and block in rested and rested[parent][1] < rested[block][1]:
                problems.append(f"block {block} would be evicted after its parent {parent}")
        problems.extend(f"resting block {block} is not cached" for block in rested if block not in cached)
        problems.extend(
            f"block {block} rests in the wrong place"
            for block, (kind, _) in rested.items()
            if kind != self._kinds[block]
        )
        return problems

    def _slot_problems(self) -> list[str]:
        slots = range(self.num_blocks, self.num_blocks + self.num_slots)
        if sorted([*self._free_slots, *self._lowered]) != list(slots):
            return ["the slots of the lower tier are not those that are free or hold a block"]
        return [f"a copy to slot {slot} was not made" for slot in self.moved_down]
