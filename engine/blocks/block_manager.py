"""Paged KV bookkeeping: which sequences hold which blocks, and which blocks are free.

A block id is an index into the KV slab. Invariant: a block is in exactly one of three states: free (its content means
nothing), used (one sequence or more reference it) or cached (unreferenced, but it holds a known prefix, and can be
reused or evicted). Every operation is O(1) per block.
"""

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator

from engine.blocks.disk_copies import DiskBlock, DiskTier
from engine.blocks.disk_prefixes import DiskPrefixCache
from engine.blocks.lower_tier import LowerTier
from engine.blocks.resting import OUTPUT, prompt_kind
from engine.blocks.tier_traffic import TierTraffic
from engine.blocks.window_blocks import NoWindows, WindowBlocks
from engine.sequences.moves import Moves
from engine.sequences.sequence import Sequence, SequenceStatus
from runtime.errors import UnavailableError


class BlockManager:
    """Engine thread only. Evicted prefixes move to the lower tiers, where there are any: see tier_traffic.py."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        tier: LowerTier | None = None,
        disk: DiskTier | None = None,
        found: Iterable[tuple[int, DiskBlock]] = (),
        *,
        window: int = 0,
        num_window_blocks: int = 0,
    ) -> None:
        """found: what lies on the disk already, by its slot there, the youngest first. num_window_blocks: of the layers
        with that window, where they have blocks of their own; 0: they have not."""
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        num_slots, num_copies = (one.num_slots if one is not None else 0 for one in (tier, disk))
        places = [one.num_window_slots if one is not None else 0 for one in (tier, disk)]
        self.cache = DiskPrefixCache(block_size, num_blocks, num_slots, num_copies, (places[0], places[1]))
        self.cache.adopt((copy + self.cache.first_copy, block) for copy, block in found)
        table, moves = self.cache.table, Moves()
        self.windows: WindowBlocks = NoWindows(block_size, table, moves)
        if num_window_blocks:
            self.windows = WindowBlocks(num_window_blocks, window, block_size, table, moves, num_blocks)
        self.tiers = TierTraffic(self.cache, block_size, tier, disk, moves, self.windows)
        self._references = array("i")  # by block id, up to the highest block ever used
        self._returned: list[int] = []  # free blocks that were used before; the last one is reused first
        self._holders: dict[Sequence, None] = {}  # sequences with blocks
        self._now_s = 0.0

    @property
    def num_free(self) -> int:
        """Blocks that were never used, or were returned without being cached."""
        return self.num_blocks - len(self._references) + len(self._returned)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks that hold a prefix."""
        return self.cache.num_resting

    @property
    def num_used(self) -> int:
        """Blocks that at least one sequence references."""
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now, cached ones included."""
        return self.num_free + self.num_cached

    @property
    def num_at_once(self) -> int:
        """Blocks that running sequences can be given now, with places in all layers."""
        return min(self.num_available, self.windows.num_available)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, sequence: Sequence, *, keep_available: int = 0, arrives: bool = False) -> bool:
        """Takes blocks for all tokens of the sequence; the longest cached prefix becomes its computed tokens.

        At least the last token is left to compute, because a token is sampled after it. False, with nothing changed,
        when fewer than `keep_available` blocks would be left. arrives: its KV is computed elsewhere.
        """
        assert not sequence.block_table
        hits = self.tiers.usable_hits(sequence)
        here, lowered = self.cache.by_home(hits)
        num_new = self.blocks_for(sequence.num_tokens) - len(here)
        num_resting = self._num_resting(here)
        if num_new + num_resting + keep_available > self.num_available:
            return False
        held = self.windows.begins_with(sequence.num_tokens, len(hits), arrives=arrives)
        if not self.windows.has_room(here, held, keep_available):
            return False
        if sequence.prefill_only and not self.windows.can_promise(held):
            return False
        self._share(here, num_resting)
        self.cache.keep(lowered)
        places = self.tiers.hold_places(hits, held)
        # Sorted, blocks that were evicted deepest first form one run of memory again, and are shipped as one.
        # Who has to wait for copies anyway leaves empty blocks to decodes, which would wait behind all these copies.
        new = sorted(self._take(num_new, self.tiers.spare // 2 if num_new > self.num_free else 0))
        sequence.block_table = here + new
        self.windows.begin(sequence, held)
        self.tiers.raise_to(sequence, len(here), lowered, places)
        sequence.moves = self.tiers.moves_of(sequence)
        sequence.num_committed_blocks = len(hits)
        sequence.found(len(hits) * self.block_size)
        self._holders[sequence] = None
        self.tiers.forgo(sequence)
        return True

    def append(self, sequence: Sequence) -> bool:
        """Takes blocks for all tokens that the sequence has now. False when too few are available; then it has got
        none."""
        num_new = self.blocks_for(sequence.num_tokens) - len(sequence.block_table)
        if num_new <= 0:
            return True
        self.windows.slide(sequence, sequence.num_scheduled_tokens)
        if num_new > self.num_at_once:
            return False
        new = self._take(num_new)
        sequence.block_table += new
        sequence.moves += self.tiers.moves.of(new)
        self.windows.reach(sequence, sequence.num_scheduled_tokens, sequence.num_tokens)
        return True

    def reach(self, sequence: Sequence, num_tokens: int, keep_available: int) -> int:
        """How many of its next tokens, which are within its blocks, a sequence can compute in the next step: fewer
        where layers with a window have few places. keep_available: places that others may need soon."""
        start = sequence.num_scheduled_tokens
        return self.windows.reach(sequence, start, start + num_tokens, keep_available)

    def commit(self, sequence: Sequence) -> None:
        """Puts the full blocks that were computed since the last commit into the prefix cache.

        Where another sequence was faster, this sequence takes the cached (canonical) block and gives up its own copy.
        The copy is kept while a reader may need it: a transfer (pinned), or a step on its way.
        """
        num_full = sequence.num_computed_tokens // self.block_size
        if num_full <= sequence.num_committed_blocks:
            return
        sequence.hash_blocks(num_full, self.block_size)
        first = sequence.num_committed_blocks
        # Because no block below an uncached one is cached, blocks where others were faster come first.
        if canonical := self.cache.table.match(sequence, first, num_full):
            self._move_over(sequence, first, canonical)
            first += len(canonical)
        if first < num_full:
            first += self._insert(sequence, first, num_full)
        sequence.num_committed_blocks = first

    def _move_over(self, sequence: Sequence, first: int, canonical: list[int]) -> None:
        here, lowered = self.cache.by_home(canonical)
        places = slice(first, first + len(here))
        own = sequence.block_table[places]
        if lowered:  # their content lies in the sequence's own blocks already
            self.cache.keep(lowered)
            self.cache.raise_to(sequence.block_table[places.stop : first + len(canonical)], lowered)
        self._share(here, self._num_resting(here))
        sequence.block_table[places] = here
        self.windows.move(sequence, first, own)
        sequence.moves += self.tiers.moves.of(here)
        if sequence.pinned or sequence.num_in_flight_tokens:
            sequence.retired_blocks += own
        else:
            self._drop(own)

    def _insert(self, sequence: Sequence, first: int, end: int) -> int:
        """Caches blocks [first, ...) of the table, and returns how many."""
        num_of_prompt = min(end, max(first, sequence.num_prompt_tokens // self.block_size)) - first
        kind_of_prompt = prompt_kind(sequence.num_prompt_tokens)
        kinds = bytes([kind_of_prompt]) * num_of_prompt + bytes([OUTPUT]) * (end - first - num_of_prompt)
        return self.cache.insert(sequence, first, kinds)

    def settle(self, sequence: Sequence) -> None:
        """Gives up the copies that the sequence kept for a step. Invariant: no step reads its blocks now."""
        if not sequence.pinned:
            self.windows.settle(sequence)
            self._drop(sequence.retired_blocks)
            sequence.retired_blocks = []

    def free(self, sequence: Sequence) -> None:
        """Drops the sequence's references, deepest block first; a sequence without blocks waits for none any more."""
        self.tiers.forgo(sequence)
        if sequence not in self._holders:
            return
        del self._holders[sequence]
        if sequence.status is SequenceStatus.FINISHED:
            self._follow_hint(sequence)
        self.windows.end(sequence)
        self._drop(sequence.block_table[::-1])
        self._drop(sequence.retired_blocks)
        sequence.block_table = []
        sequence.retired_blocks = []
        sequence.num_committed_blocks = 0
        sequence.num_computed_tokens = 0

    def _follow_hint(self, sequence: Sequence) -> None:
        hint, num_full = sequence.hint, sequence.num_prompt_tokens // self.block_size
        prompt = sequence.block_table[: min(num_full, sequence.num_committed_blocks)]
        if hint.keep_s:
            self.cache.retain(prompt, self._now_s + hint.keep_s)
        elif hint.drop:
            self.cache.drop(prompt[::-1])

    def expire(self, now_s: float) -> None:
        """What was to be kept until now need not stay. Called with a clock that only rises, before each step."""
        self._now_s = now_s
        self.cache.expire(now_s)

    def check_unused(self) -> None:
        """Raises UnavailableError when a sequence holds a block."""
        if self.num_used:
            raise UnavailableError(f"{self.num_used} KV blocks are still in use")

    def clear(self) -> None:
        """Empties the prefix cache but for blocks that sequences hold; those are announced again. When it returns, no
        copy is under way."""
        self.tiers.clear()
        self._give_back(self.cache.clear())

    def vacate(self) -> None:
        """Empties the device: prefixes that fit go into the lower tier, and are there when it returns. Invariant: no
        sequence holds blocks."""
        assert not self._holders
        if not self.cache.num_slots:
            self.clear()  # in one event
        else:
            self._give_back(self._evict(self.num_cached))
            self.tiers.moves.wait()

    def land(self) -> bool:
        """Books what the tiers have done, and empties blocks before they are needed, so that few steps wait for that.
        Returns whether sequences that wait for the tiers may go on. Called before each step."""
        self.windows.slide_all()
        self.windows.spare(self.tiers.spare)
        if 2 * self.num_free < self.tiers.spare:
            self._returned[:0] = self._evict(min(self.tiers.spare - self.num_free, self.num_cached))
        return self.tiers.land()

    # ------------------------------------------------------------------------------------------------------------------

    def _take(self, count: int, keep_empty: int = 0) -> list[int]:
        """Blocks, each with one reference now: returned ones, then fresh ones, then the oldest cached ones. keep_empty:
        so many empty ones stay, as far as there are cached ones in their place."""
        num_evicted = min(self.num_cached, max(0, count - max(0, self.num_free - keep_empty)))
        evicted, count = self._evict(num_evicted), count - num_evicted
        returned = self._returned
        blocks = [returned.pop() for _ in range(min(count, len(returned)))]
        num_known = len(self._references)
        num_fresh = min(count - len(blocks), self.num_blocks - num_known)
        blocks += range(num_known, num_known + num_fresh)
        self._references.frombytes(bytes(num_fresh * self._references.itemsize))
        blocks += evicted
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _evict(self, count: int) -> list[int]:
        """The oldest cached blocks. What moved to the lower tier is copied at once, before the blocks are written."""
        blocks = [self.cache.evict() for _ in range(count)]
        if blocks:
            self.tiers.write_behind()
            self.windows.forget(blocks)
        return blocks

    def _num_resting(self, hits: list[int]) -> int:
        """How many of a prefix's blocks rest: the last ones, because referenced blocks have referenced parents."""
        return len(hits) - bisect_left(hits, True, key=lambda block: self._references[block] == 0)

    def _share(self, blocks: list[int], num_resting: int) -> None:
        """Adds a reference to cached blocks, parents first. The last `num_resting` of them have none yet."""
        self.cache.reuse(blocks, num_resting)
        for block in blocks:
            self._references[block] += 1

    def _drop(self, blocks: list[int]) -> None:
        """Drops one reference of each block, children first."""
        references = self._references
        for block in blocks:
            references[block] -= 1
        self._give_back(self.cache.rest([block for block in blocks if not references[block]]))

    def _give_back(self, blocks: list[int]) -> None:
        self._returned += blocks
        self.windows.forget(blocks)

    @property
    def holders(self) -> list[Sequence]:
        """Sequences with blocks, in the order in which they got blocks."""
        return list(self._holders)

    def check_integrity(self) -> list[str]:
        """What is wrong with the books, in sentences; empty when all is well."""
        held = Counter(block for one in self._holders for block in (*one.block_table, *one.retired_blocks))
        return [
            *self.cache.check_integrity(self._references),
            *self._holder_problems(),
            *self.tiers.check_integrity(self._holders),
            *self._block_problems(held),
            *self.windows.check_integrity(set(self._returned)),
        ]

    def _holder_problems(self) -> Iterator[str]:
        for sequence in self._holders:
            if self.blocks_for(sequence.num_computed_tokens) > len(sequence.block_table):
                yield f"{sequence} has computed more tokens than its blocks hold"
            if not all(map(self.cache.table.holds, sequence.block_table[: sequence.num_committed_blocks])):
                yield f"{sequence} has a committed block that is not cached"

    def _block_problems(self, held: Counter[int]) -> Iterator[str]:
        """held: how many references of sequences each block has."""
        for block, references in enumerate(self._references):
            if references != held[block]:
                yield f"block {block} counts {references} references, sequences hold {held[block]}"
        free = set(self._returned)
        if len(free) != len(self._returned):
            yield "a block was returned twice"
        for block in free:
            if held[block] or self.cache.table.holds(block):
                yield f"free block {block} is used or cached"
        if self.num_free + self.num_cached + len(held) != self.num_blocks:
            yield f"{self.num_free} free + {self.num_cached} cached + {len(held)} used != {self.num_blocks} blocks"
