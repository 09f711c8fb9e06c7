"""Which blocks hold which prefix: computed blocks by sequence hash, and the order in which they are evicted.

The block manager counts references, and tells when a block comes to rest (nobody references it) or is reused.
Invariant: the parent of a cached block is cached. Invariant: the parent of a referenced block is referenced. Hence a
sequence's cached blocks are a prefix of its blocks. Because the block manager drops a sequence's deepest block first, a
block comes to rest after its children.

Invariant: a hit has the same tokens, the same parent and the same hash seed as the sequence that takes it, because
hashes can be made to collide. Of two prefixes with one hash, the first one is cached while it stays.

Because some blocks are reused more often than others, they age at different rates: see AGING. Whoever reuses a block
reuses its parent, and the parent of a prompt's block is a prompt's. Hence a parent never ages faster than its child,
and the oldest resting block is a leaf.
"""

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence as Run
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from baton_proto.kv_events import KvEvent, Stored
from engine.core.kv_event_log import KvEventLog, StoredRun
from engine.core.sequence import Sequence

_NOT_CACHED = -2
_ROOT = -1

# Kinds of blocks, and how fast each ages while it rests: an answer's, a prompt's by its length, and from SHORT + 1 on
# one kind per reuse. The rates are from a trace of conversations, in which a prompt's new block is reused with a chance
# of 26 % (33 % below 8k tokens, 22 % above 32k), and with 46, 54, 62, 70 and 96 % after 1, 2, 3, 4 and more than 6
# reuses. An answer's block is reused less often, because the next prompt leaves out its reasoning. See
# benchmarks/routing_quality.py.
OUTPUT, LONG, MEDIUM, SHORT = range(4)
AGING = (8.0, 1.5, 1.0, 0.7, 0.5, 0.4, 0.3, 0.25, 0.2, 0.05)
LONG_TOKENS, MEDIUM_TOKENS = 32768, 8192  # of a prompt, at least
_REUSED = bytes(min(max(kind, SHORT) + 1, len(AGING) - 1) for kind in range(len(AGING)))  # kind -> kind after a reuse


def prompt_kind(num_tokens: int) -> int:
    """The kind of a prompt's new blocks."""
    if num_tokens >= LONG_TOKENS:
        return LONG
    return MEDIUM if num_tokens >= MEDIUM_TOKENS else SHORT


class PrefixCache:
    """Arrays are indexed by block id. They grow with the highest block ever cached, so an idle pool costs nothing."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._block_of: dict[int, int] = {}  # sequence hash -> block; parents were inserted before their children
        self._parents = array("i")  # block id, _ROOT or _NOT_CACHED
        self._block_hashes = array("Q")
        self._sequence_hashes = array("Q")
        self._tokens = np.empty((0, block_size), dtype=np.uint32)
        self._seeds: dict[int, int] = {}  # hash seeds, of blocks without a parent
        self._kinds = bytearray()  # by block id
        # By kind: unreferenced blocks with the time when they came to rest, the oldest first.
        self._resting: list[OrderedDict[int, int]] = [OrderedDict() for _ in AGING]
        self._now = 0  # counts the blocks that came to rest
        self.num_resting = 0
        self.num_collisions = 0  # looks at a prefix that met another's block under its hash
        self._log = KvEventLog()

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, sequence: Sequence, first: int, end: int) -> list[int]:
        """The cached blocks that hold the sequence's blocks [first, ...), `end` excluded. Those before `first` are
        cached, and stand in its block table."""
        block_of, hashes = self._block_of, sequence.sequence_hashes
        end = bisect_left(range(end), True, lo=first, key=lambda i: hashes[i] not in block_of)
        if end == first:
            return []
        blocks = list(map(block_of.get, hashes[first:end], repeat(_NOT_CACHED)))
        num_equal = self._num_equal(sequence, first, np.frombuffer(array("i", blocks), np.int32))
        self.num_collisions += num_equal < len(blocks)
        return blocks[:num_equal]

    def _num_equal(self, sequence: Sequence, first: int, blocks: NDArray[np.int32]) -> int:
        """How many of the blocks follow each other from the sequence's block `first` on, and hold its tokens."""
        if not first and self._seeds.get(int(blocks[0])) != sequence.hash_seed:
            return 0
        above = np.roll(blocks, 1)
        above[0] = sequence.block_table[first - 1] if first else _ROOT
        strange = (blocks < 0) | (np.frombuffer(self._parents, np.int32)[blocks] != above)
        tokens = sequence.block_tokens(first, first + len(blocks), self._block_size)
        others = self._tokens.take(blocks, 0) != tokens
        if not (others.any() or strange.any()):
            return len(blocks)
        return int((others.any(1) | strange).argmax())

    def holds(self, block: int) -> bool:
        return block < len(self._parents) and self._parents[block] != _NOT_CACHED

    def insert(self, sequence: Sequence, first: int, kinds: bytes) -> int:
        """Caches the sequence's blocks from `first` on, one for each of `kinds`. Their KV is computed, those before
        are cached, and match() has found none of them. Returns how many were cached: a block whose hash is taken stays
        out, and so do those after it."""
        run = slice(first, first + len(kinds))
        blocks, hashes = sequence.block_table[run], sequence.sequence_hashes[run]
        self._grow(max(blocks) + 1)
        above = sequence.block_table[first - 1] if first else _ROOT
        parent = None if above == _ROOT else self._sequence_hashes[above]
        num_new = 0
        for block, block_hash, sequence_hash, kind in zip(
            blocks, sequence.block_hashes[run], hashes, kinds, strict=True
        ):
            if self._block_of.setdefault(sequence_hash, block) != block:
                break
            self._parents[block] = above
            self._block_hashes[block] = block_hash
            self._sequence_hashes[block] = sequence_hash
            self._kinds[block] = kind
            above = block
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
        missing = num_blocks - len(self._parents)
        if missing > 0:
            self._parents.extend([_NOT_CACHED] * missing)
            self._block_hashes.extend([0] * missing)
            self._sequence_hashes.extend([0] * missing)
            self._kinds.extend(bytes(missing))
        if num_blocks > len(self._tokens):
            grown = np.empty((max(num_blocks, 2 * len(self._tokens)), self._block_size), dtype=np.uint32)
            grown[: len(self._tokens)] = self._tokens
            self._tokens = grown

    def rest(self, blocks: list[int]) -> list[int]:
        """Blocks that nobody references any more, children first, come to rest. Returns those that are not cached."""
        kinds, parents, resting, now = self._kinds, self._parents, self._resting, self._now
        strangers = []
        for block in blocks:
            if block < len(parents) and parents[block] != _NOT_CACHED:
                now += 1
                resting[kinds[block]][block] = now
            else:
                strangers.append(block)
        self.num_resting += now - self._now
        self._now = now
        return strangers

    def reuse(self, blocks: list[int], num_resting: int) -> None:
        """A sequence found these blocks, parents first, instead of computing them. The last `num_resting` rested; now
        they are referenced."""
        kinds, resting = self._kinds, self._resting
        for block in blocks[len(blocks) - num_resting :]:
            del resting[kinds[block]][block]
        for block in blocks:
            kinds[block] = _REUSED[kinds[block]]
        self.num_resting -= num_resting

    def evict(self) -> int:
        """Forgets the oldest resting block, which is a leaf, and returns it."""
        kinds = [(resting, rate) for resting, rate in zip(self._resting, AGING, strict=True) if resting]
        block, _ = max(kinds, key=self._age)[0].popitem(last=False)
        self.num_resting -= 1
        self._log.removed(self._forget(block))
        return block

    def _age(self, resting: tuple[OrderedDict[int, int], float]) -> float:
        """The age of the oldest block of a kind."""
        blocks, rate = resting
        return (self._now - next(iter(blocks.values()))) * rate

    def clear(self) -> list[int]:
        """Forgets all resting blocks, and returns them. Referenced ones stay, and are announced again after the
        `Cleared`."""
        blocks = [block for resting in self._resting for block in resting]
        for block in blocks:
            self._forget(block)
        for resting in self._resting:
            resting.clear()
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
        run_ending_at: dict[int, StoredRun] = {}  # block -> the run that it ends
        for sequence_hash, block in self._block_of.items():
            parent = self._parents[block]
            run = run_ending_at.pop(parent, None)
            if run is None:
                run = StoredRun(self._parent_hash(block))
                runs.append(run)
            run.block_hashes.append(self._block_hashes[block])
            run.sequence_hashes.append(sequence_hash)
            run_ending_at[block] = run
        return runs

    def _parent_hash(self, block: int) -> int | None:
        parent = self._parents[block]
        return None if parent == _ROOT else self._sequence_hashes[parent]

    def _forget(self, block: int) -> int:
        sequence_hash = self._sequence_hashes[block]
        del self._block_of[sequence_hash]
        if self._parents[block] == _ROOT:
            del self._seeds[block]
        self._parents[block] = _NOT_CACHED
        return sequence_hash

    def check_integrity(self, references: Run[int]) -> list[str]:
        """What is wrong with the books, in sentences. `references[block]`: how many sequences use a block."""
        problems = []
        cached = set(self._block_of.values())
        if len(cached) != len(self._block_of):
            problems.append("two sequence hashes name one block")
        held = {block for block, parent in enumerate(self._parents) if parent != _NOT_CACHED}
        if held != cached:
            problems.append(f"blocks {sorted(held ^ cached)} are cached by one account only")
        if self._seeds.keys() != {block for block in held if self._parents[block] == _ROOT}:
            problems.append("hash seeds are kept of other blocks than those without a parent")
        if self.num_resting != sum(map(len, self._resting)):
            problems.append(f"{self.num_resting} blocks should rest, {sum(map(len, self._resting))} do")
        rested = {block: (kind, at) for kind, resting in enumerate(self._resting) for block, at in resting.items()}
        for sequence_hash, block in self._block_of.items():
            parent = self._parents[block]
            if self._sequence_hashes[block] != sequence_hash:
                problems.append(f"block {block} is filed under a foreign hash")
            if (references[block] == 0) != (block in rested):
                problems.append(f"cached block {block} has {references[block]} references, resting {block in rested}")
            if parent == _ROOT:
                continue
            if parent not in cached:
                problems.append(f"parent {parent} of cached block {block} is not cached")
            elif references[block] and not references[parent]:
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
