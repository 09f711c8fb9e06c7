"""Paged KV bookkeeping: which sequences hold which blocks, and which blocks are free.

A block id is an index into the KV slab. Invariant: a block is in exactly one of three states: free (its content means
nothing), used (one sequence or more reference it) or cached (unreferenced, but it holds a known prefix, and can be
reused or evicted). Every operation is O(1) per block.

With a lower tier, evicted prefixes move there, and come back when a sequence finds them. Those that came to the disk
are read into the lower tier's slots before the sequence gets blocks; meanwhile the caller lets others pass. Where
copies take time, a sequence gets its blocks at once, and its `moves`, which its first step comes after.
"""

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence as Run
from math import inf
from typing import Protocol

from baton_proto.kv_events import KvEvent, Stored
from engine.blocks.disk_copies import DiskBlock, DiskTier
from engine.blocks.disk_prefixes import DiskPrefixCache
from engine.blocks.resting import OUTPUT, prompt_kind
from engine.sequences.moves import Move, Moves
from engine.sequences.sequence import Sequence, SequenceStatus
from runtime.errors import UnavailableError


class LowerTier(Protocol):
    """Memory for blocks that do not fit on the device. Copies of a block or slot are made in the order of the calls;
    None: they are made. Invariant: no step on its way writes or reads the blocks."""

    num_slots: int
    spare: int  # blocks of the device that are emptied before they are needed, because copies take time

    def store(self, blocks: Run[int], slots: Run[int]) -> Move | None:
        """Copies blocks of the device into slots."""
        ...

    def load(self, slots: Run[int], blocks: Run[int]) -> Move | None:
        """Copies slots into blocks of the device."""
        ...

    @property
    def block_s(self) -> float:
        """Seconds that a block takes back to the device, by what was measured; 0: nothing was."""
        ...

    def load_s(self, num_blocks: int) -> float:
        """Seconds until so many more blocks would be on the device."""
        ...

    def close(self) -> None:
        """Gives the memory back. There is no other call after it."""
        ...


class BlockManager:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        tier: LowerTier | None = None,
        disk: DiskTier | None = None,
        found: Iterable[tuple[int, DiskBlock]] = (),
    ) -> None:
        """found: what lies on the disk already, by its slot there, the youngest first."""
        assert num_blocks > 0
        assert block_size > 0
        assert disk is None or tier is not None
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_raised = 0  # blocks that were copied back from the lower tier
        self.num_moved_down = 0  # blocks that were copied there
        self.num_read = 0  # blocks that were read from the disk
        self.compute_s: Callable[[int], float] = lambda num_tokens: inf  # about how long prompt tokens take here
        self.step_s: Callable[[], float] = lambda: 0.0  # how long the last step took
        self._moves = Moves()
        self._wake: Callable[[], object] = lambda: None
        self._is_flushing = False
        self._is_awaited_move = False  # whether somebody asks again when one has ended
        self._tier = tier
        self._disk = disk
        num_copies = disk.num_slots if disk is not None else 0
        self._cache = DiskPrefixCache(block_size, num_blocks, tier.num_slots if tier is not None else 0, num_copies)
        self._cache.adopt((copy + self._cache.first_copy, block) for copy, block in found)
        self._restoring: dict[Sequence, set[int]] = {}  # waiting sequences, and what was read for them
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
        return self._cache.num_resting

    @property
    def num_used(self) -> int:
        """Blocks that at least one sequence references."""
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now, cached ones included."""
        return self.num_free + self.num_cached

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, sequence: Sequence, *, keep_available: int = 0) -> bool:
        """Takes blocks for all tokens of the sequence; the longest cached prefix becomes its computed tokens.

        At least the last token is left to compute, because a token is sampled after it. False, with nothing changed,
        when fewer than `keep_available` blocks would be left.
        """
        assert not sequence.block_table
        hits = self._usable(self._hits(sequence))
        here, lowered = self._by_home(hits)
        num_new = self.blocks_for(sequence.num_tokens) - len(here)
        num_resting = self._num_resting(here)
        if num_new + num_resting + keep_available > self.num_available:
            return False
        self._share(here, num_resting)
        self._cache.keep(lowered)
        # Sorted, blocks that were evicted deepest first form one run of memory again, and are shipped as one.
        # Who has to wait for copies anyway leaves empty blocks to decodes, which would wait behind all these copies.
        keep_empty = self._tier.spare // 2 if self._tier is not None and num_new > self.num_free else 0
        new = sorted(self._take(num_new, keep_empty))
        if lowered:
            self._restore(lowered, new[: len(lowered)])
        sequence.block_table = here + new
        sequence.moves = self._moves.of(sequence.block_table)
        sequence.num_committed_blocks = len(hits)
        sequence.num_computed_tokens = len(hits) * self.block_size
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        self._holders[sequence] = None
        self.forgo(sequence)
        return True

    def _by_home(self, blocks: list[int]) -> tuple[list[int], list[int]]:
        """A prefix's blocks on the device, and those after them, in lower tiers."""
        num_here = self._num_before(blocks, self.num_blocks)
        return blocks[:num_here], blocks[num_here:]

    def _hits(self, sequence: Sequence) -> list[int]:
        """Its cached blocks, wherever they lie, up to the first token that is to be computed: the last one at the
        latest."""
        return self._cache.match(sequence, 0, self._hash(sequence))

    def _hash(self, sequence: Sequence) -> int:
        """Hashes the blocks that need not be computed where they are cached, and returns how many they are."""
        limit = min(sequence.num_tokens - 1, sequence.num_cacheable_tokens) // self.block_size
        sequence.hash_blocks(limit, self.block_size)
        return limit

    def _usable(self, hits: list[int]) -> list[int]:
        """The hits before the first one that would have to be read from the disk; those of the device alone, when the
        others are computed sooner than copied."""
        if self._disk is not None:
            first = self._num_before(hits, self._cache.first_copy)
            hits = hits[: next((i for i in range(first, len(hits)) if not self._is_in_memory(hits[i])), len(hits))]
        if self._tier is not None:
            here, lowered = self._by_home(hits)
            if lowered and self._tier.load_s(len(lowered)) > self.compute_s(len(lowered) * self.block_size):
                return here
        return hits

    def _num_before(self, hits: list[int], first_id: int) -> int:
        """How many of a prefix's blocks have homes of ids below `first_id`: the first ones."""
        return bisect_left(hits, True, key=lambda block: block >= first_id)

    def _restore(self, lowered: list[int], blocks: list[int]) -> None:
        """Copies kept blocks of lower tiers to the device."""
        assert self._tier is not None
        self._moves.add(self._tier.load(self._slots_of(lowered), blocks), blocks)
        self._cache.raise_to(blocks, lowered)
        self.num_raised += len(blocks)

    def _slots_of(self, lowered: list[int]) -> list[int]:
        """Where the content of blocks of lower tiers lies."""
        return [slot - self.num_blocks for slot in map(self._cache.content, lowered) if slot is not None]

    def cached_tokens(self, sequence: Sequence) -> int:
        """Tokens that a sequence without blocks would find cached if it got blocks now."""
        return len(self._usable(self._hits(sequence))) * self.block_size

    def tokens_at_hand(self, sequence: Sequence) -> int:
        """cached_tokens(), and what the disk brings sooner than it is computed."""
        return self._num_at_hand(self._hits(sequence)) * self.block_size

    def more_at_hand(self, sequence: Sequence, at_hand: int) -> int:
        """tokens_at_hand() where so many were at hand before and are taken to be so still: quicker, because only what
        has come to the device since is compared."""
        first, end = at_hand // self.block_size, self._hash(sequence)
        following = self._cache.match(sequence, first, min(first + 1, end))
        if not following or following[0] >= self.num_blocks:
            return at_hand
        return at_hand + self._num_at_hand(self._cache.match(sequence, first, end)) * self.block_size

    def _num_at_hand(self, hits: list[int]) -> int:
        num_cached = len(self._usable(hits))
        num_read = len(hits) - num_cached if self._disk is not None else 0
        return len(hits) if num_read and self._is_sooner(num_read, num_read) else num_cached

    def shared_tokens(self, sequence: Sequence, other: Sequence) -> int:
        """Leading tokens in whole blocks that two prompts have in common, by their hashes, and that need not be
        computed for the first one where they are cached. `other` has blocks."""
        ours, theirs = sequence.sequence_hashes, other.sequence_hashes
        end = min(self._hash(sequence), len(theirs))
        return bisect_left(range(end), True, key=lambda i: ours[i] != theirs[i]) * self.block_size

    # --- the disk -----------------------------------------------------------------------------------------------------

    def restores(self, sequence: Sequence) -> bool:
        """Whether a sequence without blocks had better wait, because its next blocks are read from the disk, and copied
        to the device, sooner than they are computed. Begins to read them."""
        assert not sequence.block_table
        if self._disk is None or self._tier is None:
            return False
        reads = self._cache.copies.reads
        if num_left := len(self._restoring.get(sequence, set()) & reads.keys()):  # without a look at each block
            return self._is_sooner(0, num_left)
        hits = self._hits(sequence)
        on_disk = hits[self._num_before(hits, self._cache.first_copy) :]
        missing = [block for block in on_disk if not self._is_in_memory(block)]
        if not missing or not self._is_sooner(sum(block not in reads for block in missing), len(missing)):
            return False
        self._restoring.setdefault(sequence, set()).update(on_disk)
        for block in on_disk:
            self._cache.copies.hold(block)
        self._cache.fetch(missing)
        self._carry_out()
        return any(block in reads for block in missing)

    def _is_sooner(self, num_new: int, num_blocks: int) -> bool:
        """Whether blocks of the disk, of which some are not being read yet, come sooner than they are computed."""
        assert self._disk is not None
        assert self._tier is not None
        restore_s = self._disk.read_s(num_new) + self._tier.load_s(num_blocks)
        return restore_s < self.compute_s(num_blocks * self.block_size)

    def restoring_ms(self) -> tuple[float, float]:
        """What a token takes to the device from host memory and from the disk, by what was measured; 0: not known."""
        host_s = self._tier.block_s if self._tier is not None else 0.0
        disk_s = self._disk.block_s if self._disk is not None else 0.0
        return host_s / self.block_size * 1e3, (disk_s + host_s if disk_s else 0.0) / self.block_size * 1e3

    def forgo(self, sequence: Sequence) -> None:
        """The sequence does not wait for the disk any more."""
        for copy in self._restoring.pop(sequence, ()):
            if not self._is_awaited(copy):
                self._cache.copies.let_go(copy)

    # --- copies between device and lower tier -------------------------------------------------------------------------

    def is_near(self, sequence: Sequence) -> bool:
        """Whether the moves of its blocks are enqueued, and end within the time of a step."""
        step_s = self.step_s()
        return all(move.is_enqueued() and move.left_s() <= step_s for move in sequence.moves)

    def is_moving(self, sequence: Sequence) -> bool:
        """Whether blocks that others shall write for it are still being copied. Then land() will have news."""
        moves = self._moves.of(sequence.block_table[sequence.num_committed_blocks :])
        for move in moves:
            move.then(self._wake)
        self._is_awaited_move |= bool(moves)
        return bool(moves)

    def _keep_spare(self) -> None:
        """Empties blocks before they are needed, so that few steps wait for that."""
        spare = self._tier.spare if self._tier is not None else 0
        if 2 * self.num_free < spare:
            self._returned[:0] = self._evict(min(spare - self.num_free, self.num_cached))

    def land(self) -> bool:
        """Books what the tiers have done. Whether sequences that wait for them may go on."""
        news = self._moves.end() and self._is_awaited_move
        if news:
            self._is_awaited_move = False
        self._keep_spare()
        return self._land_disk() or news

    def _land_disk(self) -> bool:
        if self._disk is None:
            return False
        news = False
        done = self._disk.done()
        for copy, written, ok in done:
            copy += self._cache.first_copy
            if written:
                self._cache.written(copy, ok)
            else:
                self._cache.was_read(copy, ok)
                self.num_read += ok
                news = True
                if not ok:  # who waits for it asks anew: what was to follow it is lost
                    for sequence in [one for one, wanted in self._restoring.items() if copy in wanted]:
                        self.forgo(sequence)
            if self._is_awaited(copy):
                self._cache.copies.hold(copy)
        if done:
            self._write_behind()
        if self._restoring and self._disk.read_s(0) == inf:
            news = True
            for sequence in list(self._restoring):
                self.forgo(sequence)
        return news

    def on_copied(self, wake: Callable[[], object]) -> None:
        """`wake` is called on some thread when land() has something to do."""
        self._wake = wake
        if self._disk is not None:
            self._disk.wake = wake

    def close(self) -> None:
        """Ends the lower tiers. There is no other call after it."""
        if self._disk is not None:
            self._disk.close()
        if self._tier is not None:
            self._tier.close()

    @property
    def num_disk_errors(self) -> int:
        """Reads and writes of the disk tier that failed."""
        return self._disk.num_errors if self._disk is not None else 0

    def _is_in_memory(self, block: int) -> bool:
        return self._cache.content(block) is not None

    def _is_awaited(self, copy: int) -> bool:
        return any(copy in wanted for wanted in self._restoring.values())

    def _write_behind(self) -> None:
        if self._disk is not None:
            write = self._cache.write_all if self._is_flushing else self._cache.write_behind
            write(self._disk.max_writes)
        self._carry_out()

    def _carry_out(self) -> None:
        """Makes the copies that the cache has decided on: to host memory at once, before the blocks are written."""
        cache, copies = self._cache, self._cache.copies
        if cache.moved_down:
            assert self._tier is not None
            slots = [slot - self.num_blocks for slot in cache.moved_down]
            blocks = list(cache.moved_down.values())
            self._moves.add(self._tier.store(blocks, slots), blocks)
            self.num_moved_down += len(slots)
            cache.moved_down.clear()
        if self._disk is not None:
            for source, copy, block in copies.to_write:
                self._disk.write(source - self.num_blocks, copy - cache.first_copy, block)
            for copy, target, block in copies.to_read:
                self._disk.read(copy - cache.first_copy, target - self.num_blocks, block)
            copies.to_write.clear()
            copies.to_read.clear()

    def append(self, sequence: Sequence) -> bool:
        """Takes blocks for all tokens that the sequence has now. False, with nothing changed, when too few are
        available."""
        num_new = self.blocks_for(sequence.num_tokens) - len(sequence.block_table)
        if num_new <= 0:
            return True
        if num_new > self.num_available:
            return False
        new = self._take(num_new)
        sequence.block_table += new
        sequence.moves += self._moves.of(new)
        return True

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
        if canonical := self._cache.match(sequence, first, num_full):
            self._move_over(sequence, first, canonical)
            first += len(canonical)
        if first < num_full:
            first += self._insert(sequence, first, num_full)
        sequence.num_committed_blocks = first

    def _move_over(self, sequence: Sequence, first: int, canonical: list[int]) -> None:
        here, lowered = self._by_home(canonical)
        places = slice(first, first + len(here))
        own = sequence.block_table[places]
        if lowered:  # their content lies in the sequence's own blocks already
            self._cache.keep(lowered)
            self._cache.raise_to(sequence.block_table[places.stop : first + len(canonical)], lowered)
        self._share(here, self._num_resting(here))
        sequence.block_table[places] = here
        sequence.moves += self._moves.of(here)
        if sequence.pinned or sequence.num_in_flight_tokens:
            sequence.retired_blocks += own
        else:
            self._drop(own)

    def _insert(self, sequence: Sequence, first: int, end: int) -> int:
        """Caches blocks [first, ...) of the table, and returns how many."""
        num_of_prompt = min(end, max(first, sequence.num_prompt_tokens // self.block_size)) - first
        kind_of_prompt = prompt_kind(sequence.num_prompt_tokens)
        kinds = bytes([kind_of_prompt]) * num_of_prompt + bytes([OUTPUT]) * (end - first - num_of_prompt)
        return self._cache.insert(sequence, first, kinds)

    def settle(self, sequence: Sequence) -> None:
        """Gives up the copies that the sequence kept for a step. Invariant: no step reads its blocks now."""
        if not sequence.pinned:
            self._drop(sequence.retired_blocks)
            sequence.retired_blocks = []

    def free(self, sequence: Sequence) -> None:
        """Drops the sequence's references, deepest block first; a sequence without blocks waits for none any more."""
        self.forgo(sequence)
        if sequence not in self._holders:
            return
        del self._holders[sequence]
        if sequence.status is SequenceStatus.FINISHED:
            self._follow_hint(sequence)
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
            self._cache.retain(prompt, self._now_s + hint.keep_s)
        elif hint.drop:
            self._cache.drop(prompt[::-1])

    def expire(self, now_s: float) -> None:
        """What was to be kept until now need not stay. Called with a clock that only rises, before each step."""
        self._now_s = now_s
        self._cache.expire(now_s)

    def check_unused(self) -> None:
        """Raises UnavailableError when a sequence holds a block."""
        if self.num_used:
            raise UnavailableError(f"{self.num_used} KV blocks are still in use")

    def clear(self) -> None:
        """Empties the prefix cache but for blocks that sequences hold; those are announced again. When it returns, no
        copy is under way."""
        self._moves.wait()
        self._returned += self._cache.clear()
        self._restoring.clear()
        if self._disk is not None:
            self._disk.wipe()

    def move_disk(self, name: str) -> None:
        """After clear(): the disk tier goes on under another name, see engine/tiers/disk_kv.py."""
        if self._disk is not None:
            self._disk.move(name)

    def vacate(self) -> None:
        """Empties the device: prefixes that fit go into the lower tier, and are there when it returns. Invariant: no
        sequence holds blocks."""
        assert not self._holders
        if self._tier is None:
            self.clear()  # in one event
        else:
            self._returned += self._evict(self.num_cached)
            self._moves.wait()

    def flush(self) -> bool:
        """For a worker that ends: from now on, prefixes in memory are written to the disk, those that would be given up
        last first; those of the device pass through host memory, and stay where they are. Returns whether any are being
        written."""
        if self._disk is None:
            return False
        self._is_flushing = True
        self._write_behind()
        return bool(self._cache.copies.writes)

    def runs(self) -> list[Stored]:
        """A snapshot of the prefix cache, referenced blocks included; parents come before children."""
        return self._cache.runs()

    def take_events(self) -> list[KvEvent]:
        """The changes of the prefix cache since the last call, in order."""
        return self._cache.take_events()

    @property
    def num_slots(self) -> int:
        """Blocks that the lower tier has room for."""
        return self._cache.num_slots

    @property
    def num_lowered(self) -> int:
        """Prefix blocks in the lower tier."""
        return self._cache.num_lowered

    @property
    def num_kept(self) -> int:
        """Cached blocks that requests asked to keep."""
        return len(self._cache.kept)

    @property
    def num_copies(self) -> tuple[int, int]:
        """Blocks with a copy on the disk, and how many it has room for."""
        return len(self._cache.copies.of), len(self._cache.copies.all)

    @property
    def num_collisions(self) -> int:
        """Looks into the prefix cache that found another prefix's block under a hash, and left it alone."""
        return self._cache.num_collisions

    @property
    def has_events(self) -> bool:
        return self._cache.has_events

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
        blocks = [self._cache.evict() for _ in range(count)]
        if blocks:
            self._write_behind()
        return blocks

    def _num_resting(self, hits: list[int]) -> int:
        """How many of a prefix's blocks rest: the last ones, because referenced blocks have referenced parents."""
        return len(hits) - bisect_left(hits, True, key=lambda block: self._references[block] == 0)

    def _share(self, blocks: list[int], num_resting: int) -> None:
        """Adds a reference to cached blocks, parents first. The last `num_resting` of them have none yet."""
        self._cache.reuse(blocks, num_resting)
        for block in blocks:
            self._references[block] += 1

    def _drop(self, blocks: list[int]) -> None:
        """Drops one reference of each block, children first."""
        references = self._references
        for block in blocks:
            references[block] -= 1
        self._returned += self._cache.rest([block for block in blocks if not references[block]])

    @property
    def holders(self) -> list[Sequence]:
        """Sequences with blocks, in the order in which they got blocks."""
        return list(self._holders)

    def check_integrity(self) -> list[str]:
        """What is wrong with the books, in sentences; empty when all is well."""
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
        awaited = set[int]().union(*self._restoring.values())
        problems.extend(f"nobody waits for {copy}" for copy in self._cache.copies.held.keys() - awaited)
        problems.extend(f"{sequence} waits for the disk" for sequence in self._restoring.keys() & self._holders.keys())
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
