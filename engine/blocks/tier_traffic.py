"""Traffic between the tiers: which copies are under way, who waits for them, and what they take.

Blocks that are evicted from the device move to the lower tier, and some of these to the disk. They come back when a
sequence finds them. Blocks that lie on the disk alone are read into slots of the lower tier before the sequence gets
blocks; meanwhile the caller lets others pass. Where copies take time, a sequence gets its blocks at once, and its
`moves`, which its first step comes after.
"""

from collections.abc import Callable, Container, Iterator
from itertools import chain
from math import inf

from engine.blocks.disk_copies import DiskTier
from engine.blocks.disk_prefixes import DiskPrefixCache
from engine.blocks.lower_tier import LowerTier
from engine.blocks.prefix_cache import num_before
from engine.blocks.window_blocks import WindowBlocks
from engine.blocks.window_traffic import WindowTraffic
from engine.sequences.moves import Move, Moves
from engine.sequences.sequence import Sequence


class TierTraffic:
    """Engine thread only. Without tiers nothing moves, and what is cached lies on the device."""

    def __init__(
        self,
        cache: DiskPrefixCache,
        block_size: int,
        tier: LowerTier | None,
        disk: DiskTier | None,
        moves: Moves,
        windows: WindowBlocks,
    ) -> None:
        """moves: those that `windows` knows."""
        assert disk is None or tier is not None
        self.num_raised = 0  # blocks that were copied back from the lower tier
        self.num_moved_down = 0  # blocks that were copied there
        self.num_read = 0  # blocks that were read from the disk
        self.spare = tier.spare if tier is not None else 0
        self.compute_s: Callable[[int], float] = lambda num_tokens: inf  # about how long prompt tokens take here
        self.step_s: Callable[[], float] = lambda: 0.0  # how long the last step took
        self.moves = moves
        self._cache = cache
        self._block_size = block_size
        self._tier = tier
        self._disk = disk
        self._windows = WindowTraffic(cache, windows, disk)
        if tier is not None:
            windows.lower = self._lower_places
        self._wake: Callable[[], object] = lambda: None
        self._is_flushing = False
        self._is_awaited_move = False  # whether somebody asks again when one has ended
        self._restoring: dict[Sequence, set[int]] = {}  # waiting sequences, and what was read for them

    # --- what a sequence would find -----------------------------------------------------------------------------------

    def usable_hits(self, sequence: Sequence) -> list[int]:
        """The cached blocks that a sequence would share if it got blocks now."""
        return self._usable(self._cache.table.hits(sequence))

    def tokens_at_hand(self, sequence: Sequence) -> int:
        """Those of usable_hits(), and what the disk brings sooner than it is computed."""
        return self._num_at_hand(self._cache.table.hits(sequence)) * self._block_size

    def more_at_hand(self, sequence: Sequence, at_hand: int) -> int:
        """tokens_at_hand() where so many were at hand before and are taken to be so still: quicker, because only what
        has come to the device since is compared."""
        match, first = self._cache.table.match, at_hand // self._block_size
        end = sequence.hash_reusable_blocks(self._block_size)
        following = match(sequence, first, min(first + 1, end))
        if not following or following[0] >= self._cache.num_blocks or not self._windows.usable(following):
            return at_hand  # what is behind it was looked at before
        return at_hand + self._num_at_hand(match(sequence, first, end)) * self._block_size

    def _num_at_hand(self, hits: list[int]) -> int:
        num_cached = len(self._usable(hits))
        if self._disk is None:
            return num_cached
        num_all = len(self._windows.usable(hits, on_disk=True))
        num_read = num_all - num_cached
        return num_all if num_read and self._is_sooner(num_read, num_read) else num_cached

    def _usable(self, hits: list[int]) -> list[int]:
        """The hits before the first one that would have to be read from the disk; those of the device alone, when the
        others are computed sooner than copied, and those behind which layers with a window have what is seen."""
        if self._disk is not None:
            first = num_before(hits, self._cache.first_copy)
            hits = hits[: next((i for i in range(first, len(hits)) if not self._is_in_memory(hits[i])), len(hits))]
        usable = self._windows.usable(hits)
        if self._tier is not None:
            here, lowered = self._cache.by_home(usable)
            if lowered and self._tier.load_s(len(lowered)) > self.compute_s(len(lowered) * self._block_size):
                return self._windows.usable(here)
        return usable

    def _is_in_memory(self, block: int) -> bool:
        return self._cache.content(block) is not None

    # --- between the device and the lower tier ------------------------------------------------------------------------

    def hold_places(self, hits: list[int], held: range) -> dict[int, int]:
        """The hit's blocks in `held` that have no place on the device: number -> place in the lower tier, which is kept
        until raise_to()."""
        return self._windows.hold(hits, held)

    def raise_to(self, sequence: Sequence, first: int, lowered: list[int], places: dict[int, int]) -> None:
        """Copies kept blocks of lower tiers to the sequence's blocks from `first` on, and kept places to its places."""
        if not (lowered or places):
            return
        assert self._tier is not None
        blocks = sequence.block_table[first : first + len(lowered)]
        slots = [slot - self._cache.num_blocks for slot in map(self._cache.content, lowered) if slot is not None]
        targets = blocks + [self._cache.num_blocks + sequence.window_table[at] for at in places]
        self.moves.add(self._tier.load([*slots, *places.values()], targets), targets)
        self._windows.release(sequence, places)
        self._cache.raise_to(blocks, lowered)
        self.num_raised += len(blocks)

    def moves_of(self, sequence: Sequence, first: int = 0) -> list[Move]:
        """The moves of the sequence's blocks from `first` on, and of their places."""
        places = (self._cache.num_blocks + place for place in sequence.window_table[first:])
        return self.moves.of(chain(sequence.block_table[first:], places))

    def _lower_places(self, blocks: list[int]) -> None:
        """Copies to the lower tier what these blocks, which stay on the device, have in their places."""
        assert self._tier is not None
        if places := self._windows.lower(blocks):
            self.moves.add(self._tier.store(list(places.values()), list(places)), list(places.values()))

    def is_near(self, sequence: Sequence) -> bool:
        """Whether the moves of the sequence's blocks are enqueued, and end within the time of a step."""
        step_s = self.step_s()
        return all(move.is_enqueued() and move.left_s() <= step_s for move in sequence.moves)

    def is_moving(self, sequence: Sequence) -> bool:
        """Whether blocks that others shall write for the sequence are still being copied. Then land() will have
        news."""
        moves = self.moves_of(sequence, sequence.num_committed_blocks)
        for move in moves:
            move.then(self._wake)
        self._is_awaited_move |= bool(moves)
        return bool(moves)

    # --- from and to the disk -----------------------------------------------------------------------------------------

    def restores(self, sequence: Sequence) -> bool:
        """Whether a sequence without blocks had better wait, because its next blocks are read from the disk, and copied
        to the device, sooner than they are computed. Begins to read them."""
        assert not sequence.block_table
        if self._disk is None:
            return False
        copies, reads, windows = self._cache.copies, self._cache.copies.reads, self._windows
        num_left = len(self._restoring.get(sequence, set()) & reads.keys())  # without a look at each block
        num_left += windows.num_reading(sequence)
        if num_left:
            return self._is_sooner(0, num_left)
        hits = windows.usable(self._fetchable(self._cache.table.hits(sequence)), on_disk=True)
        on_disk = hits[num_before(hits, self._cache.first_copy) :]
        missing = [block for block in on_disk if not self._is_in_memory(block)]
        num_new = sum(block not in reads for block in missing) + windows.num_unread(hits)
        num_late = len(hits) - len(self._usable(hits))
        if not num_late or not self._is_sooner(num_new, num_late):
            return False
        self._restoring.setdefault(sequence, set()).update(on_disk)
        for block in on_disk:
            copies.hold(block)
        self._cache.fetch(missing)
        windows.fetch(sequence, hits)
        self._carry_out()
        return any(block in reads for block in missing) or windows.num_reading(sequence) > 0

    def _fetchable(self, hits: list[int]) -> list[int]:
        """The beginning of a prefix that host memory has room for at once, beside what others wait for."""
        reads, first = self._cache.copies.reads, num_before(hits, self._cache.first_copy)
        away = [at for at in range(first, len(hits)) if hits[at] not in reads and not self._is_in_memory(hits[at])]
        return hits[: away[room]] if len(away) > (room := self._cache.num_fetchable) else hits

    def _is_sooner(self, num_new: int, num_blocks: int) -> bool:
        """Whether blocks of the disk, of which some are not being read yet, come sooner than they are computed."""
        assert self._disk is not None
        assert self._tier is not None
        restore_s = self._disk.read_s(num_new) + self._tier.load_s(num_blocks)
        return restore_s < self.compute_s(num_blocks * self._block_size)

    def forgo(self, sequence: Sequence) -> None:
        """The sequence does not wait for the disk any more."""
        for copy in self._restoring.pop(sequence, ()):
            if not self._is_awaited(copy):
                self._cache.copies.let_go(copy)
        self._windows.forgo(sequence)

    def _is_awaited(self, copy: int) -> bool:
        return any(copy in wanted for wanted in self._restoring.values())

    def land(self) -> bool:
        """Books what the tiers have done. Returns whether sequences that wait for them may go on."""
        news = self.moves.end() and self._is_awaited_move
        if news:
            self._is_awaited_move = False
        return self._land_disk() or news

    def _land_disk(self) -> bool:
        if self._disk is None:
            return False
        news = False
        done = self._disk.done()
        for one in done:
            copy, written, ok = one
            if copy in self._cache.disk_places.all:
                self._windows.landed(one)
                news |= not written
                continue
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
            self.write_behind()
        if self._restoring and self._disk.read_s(0) == inf:
            news = True
            for sequence in list(self._restoring):
                self.forgo(sequence)
        return news

    def write_behind(self) -> None:
        """Makes the copies to host memory that an eviction has decided on, and writes some old blocks to the disk."""
        if self._disk is not None:
            write = self._cache.write_all if self._is_flushing else self._cache.write_behind
            write(self._disk.max_writes)
        self._carry_out()

    def _carry_out(self) -> None:
        """Makes the copies that the cache has decided on: to host memory at once, before the blocks are written."""
        cache, copies = self._cache, self._cache.copies
        if cache.moved_down:
            assert self._tier is not None
            blocks = list(cache.moved_down.values())
            places = self._windows.lower(blocks)
            slots = [*(slot - cache.num_blocks for slot in cache.moved_down), *places]
            self.num_moved_down += len(blocks)
            blocks += places.values()
            self.moves.add(self._tier.store(blocks, slots), blocks)
            cache.moved_down.clear()
        if self._disk is not None:
            self._windows.write()  # first: a block that is written has its part on the disk
            for source, copy, block in copies.to_write:
                self._disk.write(source - cache.num_blocks, copy - cache.first_copy, block)
            for copy, target, block in copies.to_read:
                self._disk.read(copy - cache.first_copy, target - cache.num_blocks, block)
            copies.to_write.clear()
            copies.to_read.clear()

    # --- the tiers as a whole -----------------------------------------------------------------------------------------

    def restoring_ms(self) -> tuple[float, float]:
        """The time that a token takes to the device from host memory and from the disk, as measured; 0: not known."""
        host_s = self._tier.block_s if self._tier is not None else 0.0
        disk_s = self._disk.block_s if self._disk is not None else 0.0
        return host_s / self._block_size * 1e3, (disk_s + host_s if disk_s else 0.0) / self._block_size * 1e3

    @property
    def num_disk_errors(self) -> int:
        """Reads and writes of the disk that failed."""
        return self._disk.num_errors if self._disk is not None else 0

    def on_copied(self, wake: Callable[[], object]) -> None:
        """`wake` is called on some thread when land() has something to do."""
        self._wake = wake
        if self._disk is not None:
            self._disk.wake = wake

    def flush(self) -> bool:
        """Writes prefixes in memory to the disk from now on, because the worker ends. Those that would be given up last
        come first; those of the device pass through host memory, and stay where they are. Returns whether any are
        being written."""
        if self._disk is None:
            return False
        self._is_flushing = True
        self.write_behind()
        return bool(self._cache.copies.writes)

    def clear(self) -> None:
        """Nobody waits any more, and the disk is emptied. When it returns, no copy is under way between the device and
        the lower tier."""
        self.moves.wait()
        for sequence in list(self._restoring):
            self.forgo(sequence)
        if self._disk is not None:
            self._disk.wipe()

    def move_disk(self, name: str) -> None:
        """Lets the disk tier go on under another name, after clear(); see engine/tiers/disk_kv.py."""
        if self._disk is not None:
            self._disk.move(name)

    def close(self) -> None:
        """Ends the tiers. There is no other call after it."""
        if self._disk is not None:
            self._disk.close()
        if self._tier is not None:
            self._tier.close()

    def check_integrity(self, holders: Container[Sequence]) -> Iterator[str]:
        """What is wrong with the books, in sentences. holders: the sequences with blocks."""
        awaited = set[int]().union(*self._restoring.values())
        for copy in self._cache.copies.held.keys() - awaited:
            yield f"nobody waits for {copy}"
        for sequence in self._restoring:
            if sequence in holders:
                yield f"{sequence} waits for the disk"
        yield from self._windows.check_integrity()
