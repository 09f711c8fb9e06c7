"""The places of blocks in layers with a window, which are fewer than blocks.

A token of such a layer sees only the last tokens before it. Hence a sequence holds places for the blocks of its table
that its next token sees, and for those behind them that it is about to write. A block that no sequence holds keeps its
place until another block needs it: a prefix can be reused while the blocks that its next token sees have places.

Invariant: a free block has no place. Because steps run in the order in which they were scheduled, a step may give the
places that the one before it still reads to others; because that one has landed when a peer is let in, so may a peer.
A copy from a lower tier comes after the steps on their way for that reason (lower_tier.py).
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence as Run
from itertools import chain
from sys import maxsize
from typing import Final

from engine.blocks.prefix_table import PrefixTable
from engine.blocks.resting import SHORT
from engine.sequences.moves import Moves
from engine.sequences.sequence import Sequence

NOWHERE: Final = 0  # the place of blocks that have none: it may be read, and what is read there is masked


def most_held(window: int, block_size: int) -> int:
    """Blocks in which the last `window` tokens of a sequence can lie. With so many places it can advance."""
    return min(window, -(-(window - 1) // block_size) + 1)


class WindowBlocks:
    """Engine thread only. O(1) per block that gets or loses a place."""

    def __init__(
        self, num_places: int, window: int, block_size: int, table: PrefixTable, moves: Moves, first_id: int
    ) -> None:
        """num_places: with NOWHERE. window: tokens that one sees, itself included. table: of the prefix cache. moves:
        of blocks, and of places by ids from `first_id` on."""
        self._most_held = most_held(window, block_size)
        assert num_places > self._most_held
        self._num_places = num_places
        self._window = window
        self._block_size = block_size
        self._table = table
        self._moves = moves
        self._first_id = first_id
        self.place_of: dict[int, int] = {}  # by block
        self._users: dict[int, int] = {}  # block -> number of sequences that hold its place
        self._held: dict[Sequence, range] = {}  # of each sequence's block table
        self._retired: dict[Sequence, list[int]] = {}  # blocks whose places somebody still reads for the sequence
        self._stretched: list[Sequence] = []  # sequences that may hold more than they see next
        self._free = list(range(num_places - 1, NOWHERE, -1))
        # Blocks with a place that nobody holds, the oldest first. Those in the midst of a prompt that nobody asked for
        # twice are given up before those at the end of a sequence or of a prefix that was found again.
        self._passed: OrderedDict[int, None] = OrderedDict()
        self._ends: OrderedDict[int, None] = OrderedDict()
        self.lower: Callable[[list[int]], None] = lambda blocks: None  # called with ends that are about to lose places

    @property
    def num_available(self) -> int:
        """Places that can be taken now."""
        return len(self._free) + len(self._passed) + len(self._ends)

    def num_usable(self, prefix: list[int], *lower: Container[int]) -> int:
        """Blocks of the longest part of a cached prefix behind which a token finds all that it sees. lower: sequence
        hashes of blocks whose part lower tiers have."""
        usable, at, hashes = len(prefix), len(prefix), self._table.sequence_hashes
        while at > self._first_seen(usable * self._block_size):
            at -= 1
            if prefix[at] not in self.place_of and not any(hashes[prefix[at]] in one for one in lower):
                usable = at
        return usable

    def missing(self, prefix: list[int]) -> list[int]:
        """Those of a prefix's blocks that a token behind it sees and that have no place."""
        seen = prefix[self._first_seen(len(prefix) * self._block_size) :]
        return [block for block in seen if block not in self.place_of]

    def id_of(self, block: int) -> int | None:
        """The id of the block's place for a lower tier; None: it has none."""
        place = self.place_of.get(block)
        return None if place is None else self._first_id + place

    def is_passed(self, block: int) -> bool:
        """Whether a block with a place lies in the midst of a prompt that nobody asked for twice."""
        return block in self._passed

    def begins_with(self, num_tokens: int, num_hits: int, *, arrives: bool) -> range:
        """The blocks for which a sequence takes places at once, behind so many usable hits: what it needs to advance
        block by block; or what the token behind it sees, where its KV arrives as a whole."""
        num_blocks = -(-num_tokens // self._block_size)
        if arrives:
            return range(self._first_seen(num_tokens), num_blocks)
        first = self._first_seen(num_hits * self._block_size)
        return range(first, min(num_blocks, max(num_hits + 1, first + self._most_held)))

    def has_room(self, hits: list[int], held: range, keep_available: int) -> bool:
        """Whether a sequence can begin with these blocks of its table, and leave so many places available. hits: on
        the device."""
        num_shared = sum(block in self._users for block in hits[held.start : held.stop])
        return len(held) - num_shared + keep_available <= self.num_available

    def can_promise(self, held: range) -> bool:
        """Whether a sequence that nobody may preempt will advance beside the others, whatever these still take."""
        promised = sum(max(len(one), min(self._most_held, len(s.block_table))) for s, one in self._held.items())
        return promised + len(held) < self._num_places

    def begin(self, sequence: Sequence, held: range) -> None:
        """The sequence has got its table, and there was room."""
        sequence.window_table = [NOWHERE] * len(sequence.block_table)
        self._held[sequence] = held
        known = [at for at in held if sequence.block_table[at] in self.place_of]
        for at in known:  # before places are taken, because those of hits may rest
            self._hold(sequence, at)
        self._take(sequence, [at for at in held if at not in known] if known else held)

    def slide(self, sequence: Sequence, start: int) -> None:
        """Passes the blocks that the token at `start`, the next one, does not see."""
        held = self._held[sequence]
        first = max(held.start, self._first_seen(start))
        for at in range(held.start, first):
            block = sequence.block_table[at]
            is_known_end = self._table.holds(block) and self._table.kinds[block] > SHORT
            self._let_go(block, self._ends if is_known_end else self._passed)
            sequence.window_table[at] = NOWHERE
        self._held[sequence] = range(first, held.stop)

    def slide_all(self) -> None:
        """Passes what long chunks of prompts hold beyond what their sequences see next."""
        for sequence in self._stretched:
            if sequence in self._held:
                self.slide(sequence, sequence.num_scheduled_tokens)
        self._stretched.clear()

    def spare(self, count: int) -> None:
        """Empties some places before they are needed, because what lies there is copied to a lower tier first."""
        count = min(count, self._num_places // 4, self.num_available)
        if 2 * len(self._free) < count:
            self._empty(count)

    def reach(self, sequence: Sequence, start: int, end: int, keep_available: int = 0) -> int:
        """Slides, and takes places for tokens [start, end) as far as there are some. Returns how many of these tokens
        have places. keep_available: so many places are left where the sequence can advance nevertheless."""
        self.slide(sequence, start)
        held = self._held[sequence]
        if (wanted := -(-end // self._block_size)) > held.stop:
            sequence.window_table += [NOWHERE] * (len(sequence.block_table) - len(sequence.window_table))
            num_new = max(self.num_available - keep_available, held.start + self._most_held - held.stop)
            stop = max(held.stop, min(wanted, held.stop + min(num_new, self.num_available)))
            self._held[sequence] = range(held.start, stop)
            self._take(sequence, range(held.stop, stop))
            if wanted - held.start > self._most_held:
                self._stretched.append(sequence)
        return min(end, self._held[sequence].stop * self._block_size) - start

    def move(self, sequence: Sequence, first: int, own: list[int]) -> None:
        """The blocks from `first` on of the sequence's table have replaced its `own`, whose content they have. Where
        they have no place, they take over that of its own ones; else these keep theirs while somebody may read it."""
        held = self._held[sequence]
        for at, old in enumerate(own, first):
            if at not in held:
                continue
            new = sequence.block_table[at]
            if new not in self.place_of:
                self.place_of[new], self._users[new] = self.place_of.pop(old), self._users.pop(old)
            else:
                if sequence.pinned or sequence.num_in_flight_tokens:
                    self._retired.setdefault(sequence, []).append(old)
                else:
                    self._let_go(old, self._passed)
                self._hold(sequence, at)

    def end(self, sequence: Sequence) -> None:
        """The sequence gives up all that it holds."""
        for at in self._held.pop(sequence):
            self._let_go(sequence.block_table[at], self._ends)
        self.settle(sequence)
        sequence.window_table = []

    def settle(self, sequence: Sequence) -> None:
        """Nobody reads what was replaced any more."""
        for block in self._retired.pop(sequence, ()):
            self._let_go(block, self._passed)

    def forget(self, blocks: Iterable[int]) -> None:
        """These blocks, which nobody holds, become free."""
        for block in blocks:
            if (place := self.place_of.pop(block, None)) is not None:
                self._unqueue(block)
                self._free.append(place)

    # ------------------------------------------------------------------------------------------------------------------

    def _first_seen(self, position: int) -> int:
        """The first block that the token at a position sees."""
        return max(0, position - self._window + 1) // self._block_size

    def _empty(self, num_free: int) -> None:
        """Takes places from resting blocks until so many are free."""
        missing = num_free - len(self._free)
        passed = [self._passed.popitem(last=False)[0] for _ in range(min(missing, len(self._passed)))]
        ends = [self._ends.popitem(last=False)[0] for _ in range(missing - len(passed))]
        if ends:
            self.lower(ends)
        self._free += map(self.place_of.pop, passed + ends)

    def _take(self, sequence: Sequence, new: Run[int]) -> None:
        """Gives a place to these blocks of the sequence's table, those of the oldest resting blocks if need be."""
        self._empty(len(new))
        for at in new:
            place = self._free.pop()
            block = sequence.block_table[at]
            self.place_of[block], self._users[block] = place, 1
            sequence.window_table[at] = place
            sequence.moves += self._moves.of((self._first_id + place,))

    def _hold(self, sequence: Sequence, at: int) -> None:
        """One more sequence holds a block that has a place."""
        block = sequence.block_table[at]
        if block in self._users:
            self._users[block] += 1
        else:
            self._unqueue(block)
            self._users[block] = 1
        sequence.window_table[at] = self.place_of[block]
        sequence.moves += self._moves.of((self._first_id + self.place_of[block],))

    def _let_go(self, block: int, queue: "OrderedDict[int, None]") -> None:
        self._users[block] -= 1
        if not self._users[block]:
            del self._users[block]
            queue[block] = None

    def _unqueue(self, block: int) -> None:
        if self._passed.pop(block, False) is False:
            del self._ends[block]

    def check_integrity(self, free: set[int]) -> Iterator[str]:
        """What is wrong with the books, in sentences. free: blocks that nobody uses and that hold no prefix."""
        held = Counter(sequence.block_table[at] for sequence, span in self._held.items() for at in span)
        held.update(chain.from_iterable(self._retired.values()))
        if held != self._users:
            yield f"sequences hold other places than are booked: {held} and {self._users}"
        if sorted([*held, *self._passed, *self._ends]) != sorted(self.place_of):
            yield "a block with a place is neither held nor resting, or both"
        if sorted([*self._free, *self.place_of.values()]) != list(range(NOWHERE + 1, self._num_places)):
            yield "a place is lost, or of two blocks"
        if strange := free & self.place_of.keys():
            yield f"free blocks {sorted(strange)} have places"
        for sequence, span in self._held.items():
            places = [self.place_of[block] if at in span else NOWHERE for at, block in enumerate(sequence.block_table)]
            known = len(sequence.window_table)
            if sequence.window_table != places[:known] or any(places[known:]):
                yield f"{sequence} has {sequence.window_table} instead of {places}"


class NoWindows(WindowBlocks):
    """A model without such layers: no sequence holds places, and no window table has entries."""

    def __init__(self, block_size: int, table: PrefixTable, moves: Moves) -> None:
        super().__init__(1, 0, block_size, table, moves, 0)

    @property
    def num_available(self) -> int:
        return maxsize

    def begins_with(self, num_tokens: int, num_hits: int, *, arrives: bool) -> range:
        return range(0)

    def can_promise(self, held: range) -> bool:
        return True

    def begin(self, sequence: Sequence, held: range) -> None:
        self._held[sequence] = held

    def slide(self, sequence: Sequence, start: int) -> None:
        """Does nothing."""

    def reach(self, sequence: Sequence, start: int, end: int, keep_available: int = 0) -> int:
        return end - start
