"""Places in layers with a window: a few cases by hand, then anything at all against a dict of what each place holds."""

from collections.abc import Iterable
from typing import Final

import hypothesis.strategies as st
from hypothesis.stateful import invariant, rule

from engine.blocks.block_manager import BlockManager
from engine.blocks.disk_copies import DiskBlock
from engine.sequences.sequence import Sequence
from tests.engine.blocks.block_machine import (
    BlockMachine,
    LateBlockMachine,
    LateDiskBlockMachine,
    allocated,
    compute,
    few_and_many,
    prompts,
)
from tests.engine.kv_oracle import make_sequence

NOWHERE: Final = 0


def sliding(num_blocks: int, num_places: int, window: int = 8) -> BlockManager:
    """A sequence needs at most 3 of the places, beside the one that stands for none."""
    return BlockManager(num_blocks, 4, window=window, num_window_blocks=num_places)


def compute_in_chunks(manager: BlockManager, sequence: Sequence, num_tokens: int) -> None:
    while sequence.num_computed_tokens < sequence.num_tokens:
        left = sequence.num_tokens - sequence.num_computed_tokens
        reached = manager.reach(sequence, min(num_tokens, left), 0)
        assert reached
        compute(manager, sequence, sequence.num_computed_tokens + reached)
        assert manager.check_integrity() == []


def run(manager: BlockManager, name: str, prompt: Iterable[int]) -> None:
    sequence = allocated(manager, name, prompt)
    compute_in_chunks(manager, sequence, 8)
    manager.free(sequence)


def num_found(manager: BlockManager, prompt: Iterable[int]) -> int:
    return len(manager.tiers.usable_hits(make_sequence("asked for", prompt)))


def test_a_long_sequence_needs_no_more_places_than_its_window_covers() -> None:
    manager = sliding(num_blocks=64, num_places=4)
    sequence = allocated(manager, "long", range(200))
    compute_in_chunks(manager, sequence, 100)
    assert [at for at, place in enumerate(sequence.window_table) if place != NOWHERE] == [47, 48, 49]
    for token in range(200, 240):
        sequence.token_ids.append(token)
        assert manager.append(sequence)
        compute(manager, sequence)
        assert manager.check_integrity() == []
    manager.free(sequence)
    assert manager.num_cached == 60


def test_a_prefix_is_found_while_what_its_next_token_sees_has_places() -> None:
    manager = sliding(num_blocks=64, num_places=8)
    run(manager, "first", range(21))
    again = allocated(manager, "again", [*range(20), 99, 98])
    assert again.num_cached_tokens == 20
    assert [place != NOWHERE for place in again.window_table] == [False, False, False, True, True, True]


def test_ends_of_sequences_and_of_prefixes_found_twice_keep_their_places_longest() -> None:
    manager = sliding(num_blocks=64, num_places=10)
    run(manager, "short", range(9))
    run(manager, "long, and begins as the short one", range(33))
    run(manager, "other", range(100, 120))
    assert num_found(manager, range(33)) == 8
    assert num_found(manager, range(9)) == 2
    assert num_found(manager, range(25)) == 2, "the blocks in the midst of the long one went first"
    for number in range(2, 6):
        run(manager, f"other {number}", range(100 * number, 100 * number + 20))
    assert num_found(manager, range(33)) == 0
    assert len(manager.cache.table.hits(make_sequence("all are cached", range(33)))) == 8


def test_whoever_computes_what_another_was_faster_with_takes_over_its_places_or_gives_it_its_own() -> None:
    manager = sliding(num_blocks=64, num_places=20)
    fast, slow = allocated(manager, "fast", range(20)), allocated(manager, "slow", range(20))
    compute_in_chunks(manager, fast, 8)
    compute_in_chunks(manager, slow, 8)
    assert slow.block_table[:5] == fast.block_table[:5]
    assert slow.window_table == fast.window_table
    assert slow.window_table[2:5].count(NOWHERE) == 0
    manager.free(fast)
    manager.free(slow)
    for number in range(1, 9):
        run(manager, f"other {number}", range(100 * number, 100 * number + 20))
    assert num_found(manager, range(20)) == 0
    run(manager, "computed again", range(20))
    assert num_found(manager, range(20)) == 4
    assert manager.check_integrity() == []


def test_a_place_that_was_replaced_is_nobody_elses_while_a_step_on_its_way_may_read_it() -> None:
    manager = sliding(num_blocks=64, num_places=20)
    fast, slow = allocated(manager, "fast", range(20)), allocated(manager, "slow", range(20))
    compute_in_chunks(manager, fast, 8)
    assert manager.reach(slow, 8, 0) == 8
    own, available = slow.window_table[:2], manager.windows.num_available
    slow.num_in_flight_tokens = 1
    compute(manager, slow, 8)
    assert not set(slow.window_table) & set(own)
    assert manager.windows.num_available == available - 2
    slow.num_in_flight_tokens = 0
    manager.settle(slow)
    assert manager.windows.num_available == available
    assert manager.check_integrity() == []


class WindowMachine(BlockMachine):
    """Whatever a sequence's next token sees in layers with a window is what was computed there."""

    NUM_BLOCKS = 14
    NUM_PLACES = 7
    NUM_HOST_PLACES = NUM_DISK_PLACES = 0
    WINDOW = 5

    def made_manager(self, found: Iterable[tuple[int, DiskBlock]] = ()) -> BlockManager:
        super().made_manager()
        if self.tier is not None:
            self.tier.num_window_slots, self.tier.first_place = self.NUM_HOST_PLACES, self.NUM_BLOCKS
        if self.disk is not None:
            self.disk.num_window_slots = self.NUM_DISK_PLACES
        return BlockManager(
            self.NUM_BLOCKS,
            self.BLOCK_SIZE,
            self.tier,
            self.disk,
            found,
            window=self.WINDOW,
            num_window_blocks=self.NUM_PLACES,
        )

    def seen(self, num_blocks: int) -> range:
        """Of whole blocks, those that hold something that a token behind them sees."""
        position = num_blocks * self.BLOCK_SIZE
        return range(max(0, position - self.WINDOW + 1) // self.BLOCK_SIZE, num_blocks)

    def held(self, *, without: Sequence | None = None) -> set[int]:
        others = [s for s in self.sequences if s is not without]
        return self.read() | {one for s in others for one in s.window_table} - {NOWHERE}

    def read(self) -> set[int]:
        """Places that were replaced, and are read for a pinned sequence nevertheless."""
        places = self.manager.windows.place_of
        return {places[block] for s in self.sequences if s.pinned for block in s.retired_blocks if block in places}

    def usable(self, sequence: Sequence, depth: int) -> int:
        """Any tier may have what is seen, and each block lies in memory."""
        cache, places = self.manager.cache, self.manager.windows.place_of
        hits = cache.table.hits(sequence)[:depth]
        names = [cache.table.sequence_hashes[block] for block in hits]
        in_memory = next((at for at, block in enumerate(hits) if cache.content(block) is None), depth)
        has = [block in places or name in cache.host_places.of for block, name in zip(hits, names, strict=True)]
        return max(d for d in range(in_memory + 1) if all(has[at] for at in self.seen(d)))

    def has_places(self, sequence: Sequence, depth: int, keep: int) -> bool:
        hits, places = self.manager.cache.table.hits(sequence), self.manager.windows.place_of
        held, seen = self.held(), self.seen(depth)
        found = [places[hits[at]] for at in seen if hits[at] in places]
        num_blocks = self.manager.blocks_for(sequence.num_tokens)
        num_needed = min(num_blocks - depth, max(1, 3 - len(seen))) + len(seen) - len(found)
        if sequence.prefill_only:  # nobody preempts it: what the others may need is not for it
            promised = [
                max(len(s.window_table) - s.window_table.count(NOWHERE), min(3, len(s.block_table)))
                for s in self.sequences
            ]
            if sum(promised) + len(found) + num_needed >= self.NUM_PLACES:
                return False
        return len(held.union(found)) + num_needed + keep < self.NUM_PLACES

    def has_place_for_one(self, sequence: Sequence) -> bool:
        first = max(0, sequence.num_computed_tokens - self.WINDOW + 1) // self.BLOCK_SIZE
        own = set(sequence.window_table[first:]) - {NOWHERE}
        return len(self.held(without=sequence) | own) + 1 < self.NUM_PLACES

    def wrote(self, sequence: Sequence, at: int) -> None:
        assert sequence.window_table[at] != NOWHERE
        self.content[self.id_at(sequence, at)] = tuple(sequence.token_ids[: (at + 1) * self.BLOCK_SIZE])

    def id_at(self, sequence: Sequence, at: int) -> int:
        return self.NUM_BLOCKS + sequence.window_table[at]

    def begin(self, sequence: Sequence) -> None:
        super().begin(sequence)
        if not self.manager.tiers.is_moving(sequence):  # else only its hit is: a peer writes the other places at once
            for at in range(sequence.num_committed_blocks, len(sequence.block_table)):
                if sequence.window_table[at] != NOWHERE:
                    self.content[self.id_at(sequence, at)] = ()

    @invariant()
    def every_place_in_sight_holds_what_its_sequence_computed(self) -> None:
        for sequence in [one for one in self.sequences if not one.moves]:
            first = max(0, sequence.num_computed_tokens - self.WINDOW + 1) // self.BLOCK_SIZE
            for at in range(first, sequence.num_computed_tokens // self.BLOCK_SIZE):
                expected = tuple(sequence.token_ids[: (at + 1) * self.BLOCK_SIZE])
                assert self.content[self.id_at(sequence, at)] == expected

    @invariant()
    def no_place_is_written_by_two(self) -> None:
        own = [
            place
            for s in self.sequences
            for place in s.window_table[s.num_computed_tokens // self.BLOCK_SIZE :]
            if place != NOWHERE
        ]
        assert len(set(own)) == len(own)
        assert not self.read() & set(own)


class HostWindowMachine(WindowMachine, LateBlockMachine):
    """Also: above host memory, which has places of its own, and whose copies are made late."""

    NUM_BLOCKS = 8
    NUM_SLOTS = 8
    NUM_HOST_PLACES = 5

    @rule(some=st.lists(prompts, min_size=3, max_size=8))
    def serve(self, some: list[list[int]]) -> None:
        """Whole requests, one after the other."""
        for tokens in some:
            if self.allocate_to(self.new_sequence(tokens, pinned=False), 0):
                self.compute_everything(-1)
                self.compute_everything(-1)  # with few places not all of it at once
                self.free(-1, ends=True)


class DiskWindowMachine(WindowMachine, LateDiskBlockMachine):
    """Also: above a disk, which has places of its own, and fails and dies as it does for whole blocks."""

    NUM_BLOCKS = 8
    NUM_SLOTS = 6
    NUM_COPIES = 12
    NUM_HOST_PLACES = 5
    NUM_DISK_PLACES = 7


TestWindows, TestMoreWindows = few_and_many(WindowMachine, 120, 50)
TestHostWindows, TestMoreHostWindows = few_and_many(HostWindowMachine, 200, 60)
TestDiskWindows, TestMoreDiskWindows = few_and_many(DiskWindowMachine, 300, 60)
