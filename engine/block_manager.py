"""Paged KV bookkeeping: which sequence holds which blocks, who shares them, and which are free.

No tensors: block ids are indices into the KV slab. The scheduler allocates, grows and frees; the engine commits what
was computed. A block is in exactly one of three states: free (its content means nothing), used (referenced by at
least one sequence) or cached (unreferenced, but holds a known prefix and can be reused or evicted). Every operation
is O(1) per block.
"""

from array import array
from bisect import bisect_left
from collections import Counter

from baton_proto.kv_events import KvEvent, Stored
from engine.prefix_cache import OUTPUT, PrefixCache, prompt_kind
from engine.sequence import Sequence


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._cache = PrefixCache()
        self._references = array("i")  # by block id, as far as blocks were ever used
        self._returned: list[int] = []  # free blocks that were used before; the last returned is reused first
        self._holders: dict[Sequence, None] = {}  # sequences with blocks

    @property
    def num_free(self) -> int:
        """Blocks without meaning: never used, or returned without being cached."""
        return self.num_blocks - len(self._references) + len(self._returned)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks whose content can be reused."""
        return self._cache.num_resting

    @property
    def num_used(self) -> int:
        """Blocks that at least one sequence references."""
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return self.num_free + self.num_cached

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, sequence: Sequence, *, keep_available: int = 0) -> bool:
        """Takes blocks for all tokens of the sequence; its computed and cached tokens become the prefix that is cached.

        At least the last token is left to compute, because someone has to sample after it. False, and nothing
        changed, when fewer than `keep_available` blocks would be left.
        """
        assert not sequence.block_table
        limit = (sequence.num_tokens - 1) // self.block_size
        sequence.hash_blocks(limit, self.block_size)
        hits = self._cache.match(sequence.sequence_hashes, limit)
        num_new = self.blocks_for(sequence.num_tokens) - len(hits)
        # Referenced blocks have referenced parents: the resting hits are the last ones.
        num_resting = len(hits) - bisect_left(hits, True, key=lambda block: self._references[block] == 0)
        if num_new + num_resting + keep_available > self.num_available:
            return False
        for block in hits:
            self._share(block)
        # In the order of memory: what was evicted deepest first is one run again, and is shipped as one.
        sequence.block_table = hits + sorted(self._take() for _ in range(num_new))
        sequence.num_committed_blocks = len(hits)
        sequence.num_computed_tokens = len(hits) * self.block_size
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        self._holders[sequence] = None
        return True

    def cached_tokens(self, sequence: Sequence) -> int:
        """Tokens that a sequence without blocks would not have to compute if it got them now."""
        limit = (sequence.num_tokens - 1) // self.block_size
        sequence.hash_blocks(limit, self.block_size)
        return len(self._cache.match(sequence.sequence_hashes, limit)) * self.block_size

    def append(self, sequence: Sequence) -> bool:
        """Makes room for all tokens that the sequence has now. False, and nothing changed, when there is none."""
        num_new = self.blocks_for(sequence.num_tokens) - len(sequence.block_table)
        if num_new <= 0:
            return True
        if num_new > self.num_available:
            return False
        for _ in range(num_new):
            sequence.block_table.append(self._take())
        return True

    def commit(self, sequence: Sequence) -> None:
        """Puts the full blocks that were computed since the last commit into the prefix cache.

        When another sequence was faster, this one moves over to the cached (canonical) block and gives up its own
        copy. It keeps the copy for as long as someone may read it: a transfer (pinned) or a step on its way.
        """
        num_full = sequence.num_computed_tokens // self.block_size
        if num_full <= sequence.num_committed_blocks:
            return
        sequence.hash_blocks(num_full, self.block_size)
        table = sequence.block_table
        kind_of_prompt = prompt_kind(sequence.num_prompt_tokens)
        for i in range(sequence.num_committed_blocks, num_full):
            own, sequence_hash = table[i], sequence.sequence_hashes[i]
            canonical = self._cache.find(sequence_hash)
            if canonical is None:
                kind = kind_of_prompt if (i + 1) * self.block_size <= sequence.num_prompt_tokens else OUTPUT
                self._cache.insert(own, sequence.block_hashes[i], sequence_hash, table[i - 1] if i else None, kind)
                continue
            self._share(canonical)
            table[i] = canonical
            if sequence.pinned or sequence.num_in_flight_tokens:
                sequence.retired_blocks.append(own)
            else:
                self._drop(own)
        sequence.num_committed_blocks = num_full

    def settle(self, sequence: Sequence) -> None:
        """No step reads the sequence's blocks at present: gives up the copies that it kept for one."""
        if sequence.retired_blocks and not sequence.pinned:
            for block in sequence.retired_blocks:
                self._drop(block)
            sequence.retired_blocks = []

    def free(self, sequence: Sequence) -> None:
        """Drops the sequence's references, deepest block first. Without blocks it does nothing."""
        if sequence not in self._holders:
            return
        del self._holders[sequence]
        for block in reversed(sequence.block_table):
            self._drop(block)
        for block in sequence.retired_blocks:
            self._drop(block)
        sequence.block_table = []
        sequence.retired_blocks = []
        sequence.num_committed_blocks = 0
        sequence.num_computed_tokens = 0

    def clear(self) -> None:
        """Empties the prefix cache, except for blocks that sequences hold; those are announced again."""
        for block in self._cache.clear():
            self._returned.append(block)

    def runs(self) -> list[Stored]:
        """Snapshot of the prefix cache, referenced blocks included; parents before children."""
        return self._cache.runs()

    def take_events(self) -> list[KvEvent]:
        """What happened to the prefix cache since the last call, in order."""
        return self._cache.take_events()

    @property
    def has_events(self) -> bool:
        return self._cache.has_events

    def _take(self) -> int:
        """A block with one reference: a returned one, a fresh one, or the least recently used cached one."""
        if self._returned:
            block = self._returned.pop()
        elif len(self._references) < self.num_blocks:
            block = len(self._references)
            self._references.append(0)
        else:
            block = self._cache.evict()
        self._references[block] = 1
        return block

    def _share(self, block: int) -> None:
        """Of a block that somebody else has computed."""
        if self._references[block] == 0:
            self._cache.wake(block)
        self._cache.reuse(block)
        self._references[block] += 1

    def _drop(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block]:
            return
        if self._cache.holds(block):
            self._cache.rest(block)
        else:
            self._returned.append(block)

    @property
    def holders(self) -> list[Sequence]:
        """Sequences with blocks, in the order in which they got them."""
        return list(self._holders)

    def check_integrity(self) -> list[str]:
        """Compares all accounts with each other. Returns what is wrong, in sentences; empty when all is well."""
        problems = self._cache.check_integrity(self._references)
        counted = Counter[int]()
        for sequence in self._holders:
            counted.update(sequence.block_table)
            counted.update(sequence.retired_blocks)
            if self.blocks_for(sequence.num_computed_tokens) > len(sequence.block_table):
                problems.append(f"{sequence} has computed more tokens than its blocks hold")
            if not all(self._cache.holds(block) for block in sequence.block_table[: sequence.num_committed_blocks]):
                problems.append(f"{sequence} has a committed block that is not cached")
        for block, references in enumerate(self._references):
            if references != counted[block]:
                problems.append(f"block {block} counts {references} references, sequences hold {counted[block]}")
        free = set(self._returned)
        if len(free) != len(self._returned):
            problems.append("a block was returned twice")
        problems.extend(
            f"free block {block} is used or cached" for block in free if counted[block] or self._cache.holds(block)
        )
        if self.num_free + self.num_cached + len(counted) != self.num_blocks:
            problems.append(
                f"{self.num_free} free + {self.num_cached} cached + {len(counted)} used != {self.num_blocks} blocks"
            )
        return problems
