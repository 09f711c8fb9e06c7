"""The table of cached blocks: which block holds which prefix.

A block's prefix is named by its sequence hash. Invariant: a match has the same tokens, the same parent and the same
hash seed as the sequence that takes it, because hashes can be made to collide. Of two prefixes with one hash, the first
one is cached while it stays. Invariant: the parent of a cached block is cached.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Container, Iterator
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from engine.blocks.disk_copies import DiskBlock
from engine.blocks.kv_event_log import StoredRun
from engine.sequences.sequence import Sequence

_MISSING = -1
NOT_CACHED, ROOT, CHILD = range(3)  # places of a block


class PrefixTable:
    """Columns are indexed by block id. They grow with the highest block ever cached, so an idle pool costs nothing."""

    def __init__(self, block_size: int) -> None:
        self.block_of: dict[int, int] = {}  # sequence hash -> block; parents were inserted before their children
        self.sequence_hashes = array("Q")
        self.places = bytearray()  # NOT_CACHED, ROOT or CHILD
        self.kinds = bytearray()  # see resting.py
        self.seeds: dict[int, int] = {}  # hash seeds, of blocks without a parent
        self.num_collisions = 0  # matches that met another prefix's block under a hash
        self._block_size = block_size
        self._parents = array("Q")  # sequence hash of the parent of a CHILD
        self._block_hashes = array("Q")
        self._tokens = np.empty((0, block_size), dtype=np.uint32)

    def hits(self, sequence: Sequence) -> list[int]:
        """The sequence's cached blocks, wherever they lie, up to the first token that has to be computed: the last one
        at the latest."""
        return self.match(sequence, 0, sequence.hash_reusable_blocks(self._block_size))

    def match(self, sequence: Sequence, first: int, end: int) -> list[int]:
        """The cached blocks that hold the sequence's blocks [first, ...), `end` excluded. Those before `first` are
        cached, and stand in its block table."""
        block_of, hashes = self.block_of, sequence.sequence_hashes
        end = bisect_left(range(end), True, lo=first, key=lambda i: hashes[i] not in block_of)
        if end == first:
            return []
        blocks = list(map(block_of.get, hashes[first:end], repeat(_MISSING)))
        num_equal = self._num_equal(sequence, first, np.frombuffer(array("i", blocks), np.int32))
        self.num_collisions += num_equal < len(blocks)
        return blocks[:num_equal]

    def _num_equal(self, sequence: Sequence, first: int, blocks: NDArray[np.int32]) -> int:
        """How many of the blocks follow each other from the sequence's block `first` on, and hold its tokens."""
        if not first and self.seeds.get(int(blocks[0])) != sequence.hash_seed:
            return 0
        above = np.roll(np.frombuffer(self.sequence_hashes, np.uint64)[blocks], 1)
        above[0] = sequence.sequence_hashes[first - 1] if first else 0
        strange = (np.frombuffer(self._parents, np.uint64)[blocks] != above) | (blocks < 0)
        strange |= np.frombuffer(self.places, np.uint8)[blocks] != CHILD
        strange[0] &= first > 0
        tokens = sequence.block_tokens(first, first + len(blocks), self._block_size)
        others = self._tokens.take(blocks, 0) != tokens
        if not (others.any() or strange.any()):
            return len(blocks)
        return int((others.any(1) | strange).argmax())

    def holds(self, block: int) -> bool:
        return block < len(self.places) and self.places[block] != NOT_CACHED

    def insert(self, sequence: Sequence, first: int, kinds: bytes) -> int:
        """Caches the sequence's blocks from `first` on, one for each of `kinds`. Their KV is computed, those before
        are cached, and match() has found none of them. Returns how many were cached: a block whose hash is taken stays
        out, and so do those after it."""
        run = slice(first, first + len(kinds))
        blocks = sequence.block_table[run]
        self.grow(max(blocks) + 1)
        above = sequence.sequence_hashes[first - 1] if first else None
        num_new = 0
        for block, block_hash, sequence_hash, kind in zip(
            blocks, sequence.block_hashes[run], sequence.sequence_hashes[run], kinds, strict=True
        ):
            if self.block_of.setdefault(sequence_hash, block) != block:
                break
            self._name(block, sequence_hash, above, block_hash, kind)
            above = sequence_hash
            num_new += 1
        if num_new:
            # Because numpy takes ten times as long for a list of one, and an answer's blocks come one by one:
            self._tokens[blocks[:num_new] if num_new > 1 else blocks[0]] = sequence.block_tokens(
                first, first + num_new, self._block_size
            )
            if not first:
                self.seeds[blocks[0]] = sequence.hash_seed
        return num_new

    def put(self, block: int, stored: DiskBlock, kind: int) -> None:
        """Caches a block that an earlier process stored, after its parent. There is room for it: see grow()."""
        self.block_of[stored.sequence_hash] = block
        self._name(block, stored.sequence_hash, stored.parent, stored.block_hash, kind)
        self._tokens[block] = np.frombuffer(stored.tokens, "<u4")
        if stored.parent is None:
            self.seeds[block] = stored.seed

    def _name(self, block: int, sequence_hash: int, parent: int | None, block_hash: int, kind: int) -> None:
        self.places[block] = ROOT if parent is None else CHILD
        self._parents[block] = parent or 0
        self._block_hashes[block] = block_hash
        self.sequence_hashes[block] = sequence_hash
        self.kinds[block] = kind

    def stored(self, block: int, kind: int) -> DiskBlock:
        """The block's row, with that kind, as it is written to a disk."""
        tokens = self._tokens[block].astype("<u4").tobytes()
        hashes = self.sequence_hashes[block], self.parent_of(block), self._block_hashes[block]
        return DiskBlock(*hashes, self.seeds.get(block, 0), kind, tokens)

    def grow(self, num_blocks: int) -> None:
        """Makes room for block ids below `num_blocks`."""
        missing = num_blocks - len(self.places)
        if missing > 0:
            for flags in (self.places, self.kinds):
                flags.extend(bytes(missing))
            for hashes in (self._parents, self._block_hashes, self.sequence_hashes):
                hashes.extend([0] * missing)
        if num_blocks > len(self._tokens):
            grown = np.empty((max(num_blocks, 2 * len(self._tokens)), self._block_size), dtype=np.uint32)
            grown[: len(self._tokens)] = self._tokens
            self._tokens = grown

    def move(self, old: int, new: int) -> None:
        """The prefix that block `old` holds is block `new`'s from now on."""
        self.grow(new + 1)
        self.block_of[self.sequence_hashes[old]] = new
        for column in (self.places, self._parents, self._block_hashes, self.sequence_hashes, self.kinds):
            column[new] = column[old]
        self._tokens[new] = self._tokens[old]
        self.places[old] = NOT_CACHED
        if old in self.seeds:
            self.seeds[new] = self.seeds.pop(old)

    def forget(self, block: int) -> int:
        """Returns the sequence hash of the prefix that was the block's."""
        sequence_hash = self.sequence_hashes[block]
        del self.block_of[sequence_hash]
        self.seeds.pop(block, None)
        self.places[block] = NOT_CACHED
        return sequence_hash

    def parent_of(self, block: int) -> int | None:
        """The sequence hash of the block's parent."""
        return self._parents[block] if self.places[block] == CHILD else None

    def children_of(self, block: int, first_id: int) -> list[int]:
        """The block's children with ids from `first_id` on, in a time that grows with their number: for what happens
        rarely."""
        parents = np.frombuffer(self._parents, np.uint64)[first_id:]
        places = np.frombuffer(self.places, np.uint8)[first_id:]
        found = (parents == self.sequence_hashes[block]) & (places == CHILD)
        return (np.flatnonzero(found) + first_id).tolist()

    def path_below(self, known: Container[int], block: int) -> list[int]:
        """The block and those above it up to the first whose sequence hash is `known`, parents first."""
        path = []
        while self.sequence_hashes[block] not in known:
            path.append(block)
            parent = self.parent_of(block)
            if parent is None:
                break
            block = self.block_of[parent]
        return path[::-1]

    def runs(self, home_of: Callable[[int], int]) -> list[StoredRun]:
        """All cached blocks as chains within a home, parents before children."""
        runs: list[StoredRun] = []
        run_ending_at: dict[tuple[int | None, int], StoredRun] = {}  # sequence hash, home -> the run that it ends
        for sequence_hash, block in self.block_of.items():
            parent, home = self.parent_of(block), home_of(block)
            run = run_ending_at.pop((parent, home), None)
            if run is None:
                run = StoredRun(parent, home)
                runs.append(run)
            run.block_hashes.append(self._block_hashes[block])
            run.sequence_hashes.append(sequence_hash)
            run_ending_at[sequence_hash, home] = run
        return runs

    def check_integrity(self) -> Iterator[str]:
        """What is wrong with the table, in sentences."""
        cached = set(self.block_of.values())
        if len(cached) != len(self.block_of):
            yield "two sequence hashes name one block"
        held = {block for block, place in enumerate(self.places) if place != NOT_CACHED}
        if held != cached:
            yield f"blocks {sorted(held ^ cached)} are cached by one account only"
        if self.seeds.keys() != {block for block in held if self.places[block] == ROOT}:
            yield "hash seeds are kept of other blocks than those without a parent"
        for sequence_hash, block in self.block_of.items():
            if self.sequence_hashes[block] != sequence_hash:
                yield f"block {block} is filed under a foreign hash"
            above = self.parent_of(block)
            if above is not None and above not in self.block_of:
                yield f"the parent of cached block {block} is not cached"
