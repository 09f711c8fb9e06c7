"""Random traffic against a block manager, whose oracle is a dict of what each block holds."""

from collections.abc import Iterable
from typing import Any
from unittest import TestCase

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton_proto.kv_events import KvEvent, Stored
from baton_proto.worker import NO_HINT, CacheHint
from engine.blocks.block_manager import BlockManager
from engine.blocks.disk_copies import DiskBlock
from engine.sequences.moves import BEFORE_STEP
from engine.sequences.sequence import Sequence, SequenceStatus
from router.index.radix_tree import RadixTree
from tests.engine.blocks.fake_tiers import Disk, LateMove, LateSlots, Slots
from tests.engine.kv_oracle import EventReplica, make_sequence, snapshot, u64

WORKER = ("w", 1)


def compute(manager: BlockManager, sequence: Sequence, num_tokens: int | None = None) -> None:
    sequence.num_computed_tokens = sequence.num_tokens if num_tokens is None else num_tokens
    manager.commit(sequence)


def allocated(manager: BlockManager, *prompt: Any, **options: Any) -> Sequence:
    """A new sequence with blocks. The arguments are those of make_sequence."""
    sequence = make_sequence(*prompt, **options)
    assert manager.allocate(sequence)
    return sequence


def computed(manager: BlockManager, *prompt: Any, **options: Any) -> Sequence:
    """The same, and its tokens are computed."""
    sequence = allocated(manager, *prompt, **options)
    compute(manager, sequence)
    return sequence


def served(manager: BlockManager, *prompt: Any, **options: Any) -> Sequence:
    """The same, and it has given its blocks back."""
    sequence = computed(manager, *prompt, **options)
    manager.free(sequence)
    return sequence


def homes(runs: Iterable[Stored]) -> dict[int, int]:
    """By sequence hash."""
    return {name: run.home for run in runs for name in u64(run.sequence_hashes)}


# Long shared beginnings and short tails that differ: hits of every depth, duplicates, and forks.
prompts = st.builds(
    lambda root, shared, tail: [root] * shared + tail,
    root=st.integers(2, 3),
    shared=st.integers(1, 11),
    tail=st.lists(st.integers(0, 1), max_size=3),
)


hints = st.sampled_from([NO_HINT, CacheHint(keep_s=2), CacheHint(keep_s=4), CacheHint(drop=True)])
often = st.sampled_from([True] * 9 + [False])


class BlockMachine(RuleBasedStateMachine):
    """Random traffic. The oracle is a dict of what each block's content is, and who holds it."""

    BLOCK_SIZE = 2
    NUM_BLOCKS = 9
    NUM_SLOTS = 0
    NUM_COPIES = 0
    SLOTS = Slots

    def __init__(self) -> None:
        super().__init__()
        self.content: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end, when computed and full
        self.manager = self.made_manager()
        self.replica = EventReplica()
        self.sequences: list[Sequence] = []
        self.names = 0
        self.now_s = 0

    def made_manager(self, found: Iterable[tuple[int, DiskBlock]] = ()) -> BlockManager:
        """With tiers of its own."""
        self.tier = tier = self.SLOTS(self.NUM_SLOTS, self.content) if self.NUM_SLOTS else None
        self.disk = Disk(self.NUM_COPIES, tier) if self.NUM_COPIES and tier is not None else None
        return BlockManager(self.NUM_BLOCKS, self.BLOCK_SIZE, tier, self.disk, found)

    def pick(self, index: int) -> Sequence:
        return self.sequences[index % len(self.sequences)]

    @rule(tokens=prompts, pinned=st.booleans(), keep=st.integers(0, 3), hint=hints)
    def allocate(self, tokens: list[int], pinned: bool, keep: int, hint: CacheHint) -> None:
        sequence = self.new_sequence(tokens, pinned)
        sequence.hint = hint
        self.allocate_to(sequence, keep)

    def new_sequence(self, tokens: list[int], pinned: bool) -> Sequence:
        self.names += 1
        return make_sequence(str(self.names), tokens, prefill_only=pinned, pinned=pinned)

    def allocate_to(self, sequence: Sequence, keep: int) -> bool:
        tokens = sequence.token_ids
        cached = snapshot(self.manager)
        before = (self.manager.num_free, self.manager.num_cached, cached)
        available = self.manager.num_available
        referenced = {h for s in self.sequences for h in s.sequence_hashes[: s.num_committed_blocks]}
        limit = (len(tokens) - 1) // self.BLOCK_SIZE
        sequence.hash_blocks(limit, self.BLOCK_SIZE)
        hashes = sequence.sequence_hashes
        depth = next((i for i in range(limit) if hashes[i] not in cached), limit)
        depth = self.usable(sequence, depth)
        missing = self.manager.blocks_for(len(tokens)) - len(referenced.intersection(hashes[:depth]))
        has_places = self.has_places(sequence, depth, keep)
        fits = self.manager.allocate(sequence, keep_available=keep)
        assert fits == (missing + keep <= available and has_places)
        if fits:
            self.sequences.append(sequence)
            assert self.manager.num_available == available - missing
            assert sequence.num_computed_tokens == depth * self.BLOCK_SIZE
            self.begin(sequence)
        else:
            assert before == (self.manager.num_free, self.manager.num_cached, snapshot(self.manager))
        self.check_fresh_blocks(sequence)
        return fits

    def usable(self, sequence: Sequence, depth: int) -> int:
        """Of so many cached blocks of a sequence, those that it finds."""
        if self.disk is None:
            return depth
        return min(depth, len(self.manager.tiers.usable_hits(sequence)))  # what lies on the disk alone does not count

    def has_places(self, sequence: Sequence, depth: int, keep: int) -> bool:
        """Whether it could begin there where only layers with a window count."""
        return True

    def begin(self, sequence: Sequence) -> None:
        """It gets blocks: a hit really holds its tokens, and whoever holds the other blocks may write them."""
        for i, block in enumerate(sequence.block_table):
            if i < sequence.num_committed_blocks:
                assert self.content[block] == tuple(sequence.token_ids[: (i + 1) * self.BLOCK_SIZE])
            else:
                self.content[block] = ()

    def await_moves(self, sequence: Sequence) -> None:
        """As a step does."""
        for move in sequence.moves:
            move.before(BEFORE_STEP)
        sequence.moves = []

    def check_fresh_blocks(self, sequence: Sequence) -> None:
        """Blocks beyond the hit belong to this sequence alone."""
        own = sequence.block_table[sequence.num_committed_blocks :]
        others = [b for s in self.sequences if s is not sequence for b in s.block_table + s.retired_blocks]
        assert not set(own) & set(others)
        assert len(set(own)) == len(own)

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0, 99), num_tokens=st.integers(1, 6))
    def compute_and_commit(self, index: int, num_tokens: int) -> None:
        sequence = self.pick(index)
        end = min(sequence.num_tokens, sequence.num_computed_tokens + num_tokens)
        end = sequence.num_computed_tokens + self.manager.reach(sequence, end - sequence.num_computed_tokens, 0)
        self.await_moves(sequence)
        for i in range(sequence.num_computed_tokens // self.BLOCK_SIZE, end // self.BLOCK_SIZE):
            self.wrote(sequence, i)
            self.content[sequence.block_table[i]] = tuple(sequence.token_ids[: (i + 1) * self.BLOCK_SIZE])
        sequence.num_computed_tokens = end
        self.manager.commit(sequence)

    def wrote(self, sequence: Sequence, at: int) -> None:
        """A block of it is computed."""

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0, 99), token=st.integers(0, 1))
    def append(self, index: int, token: int) -> None:
        sequence = self.pick(index)
        if sequence.num_computed_tokens != sequence.num_tokens:
            return
        sequence.token_ids.append(token)
        available = self.manager.num_available
        missing = self.manager.blocks_for(sequence.num_tokens) - len(sequence.block_table)
        fits = missing <= available and self.has_place_for_one(sequence)
        if self.manager.append(sequence):
            assert missing == 0 or fits
            self.check_fresh_blocks(sequence)
        else:
            assert not fits
            sequence.token_ids.pop()

    def has_place_for_one(self, sequence: Sequence) -> bool:
        """Whether it could grow where only layers with a window count."""
        return True

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0, 99))
    def compute_everything(self, index: int) -> None:
        self.compute_and_commit(index, 99)

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0, 99), ends=st.booleans())
    def free(self, index: int, ends: bool) -> None:
        sequence = self.pick(index)
        self.sequences.remove(sequence)
        if ends:
            sequence.status = SequenceStatus.FINISHED
        self.manager.free(sequence)
        assert sequence.block_table == []
        self.manager.free(sequence)  # a second time does nothing

    @rule(seconds=st.integers(1, 3))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds
        self.manager.expire(self.now_s)

    @rule()
    def clear(self) -> None:
        self.manager.clear()
        assert self.manager.num_cached == self.manager.cache.num_lowered == 0

    @precondition(lambda self: not self.sequences)
    @rule()
    def vacate(self) -> None:
        self.manager.vacate()
        self.content.clear()
        assert self.manager.num_free == self.NUM_BLOCKS

    @invariant()
    def accounts_agree(self) -> None:
        assert self.manager.check_integrity() == []
        used = {b for s in self.sequences for b in s.block_table + s.retired_blocks}
        assert self.manager.num_used == len(used)
        assert self.manager.num_free + self.manager.num_cached + self.manager.num_used == self.NUM_BLOCKS

    @invariant()
    def every_block_holds_what_its_sequence_computed(self) -> None:
        for sequence in [one for one in self.sequences if not one.moves]:
            for i in range(sequence.num_computed_tokens // self.BLOCK_SIZE):
                assert self.content[sequence.block_table[i]] == tuple(sequence.token_ids[: (i + 1) * self.BLOCK_SIZE])

    @rule()
    def events_tell_exactly_what_is_cached(self) -> None:
        events = self.manager.cache.take_events()
        self.replica.apply(events)
        assert self.replica.parents == snapshot(self.manager)
        self.told(events)

    def told(self, events: list[KvEvent]) -> None:
        """For what else follows from the events."""

    def teardown(self) -> None:
        self.events_tell_exactly_what_is_cached()
        for sequence in self.sequences:
            self.manager.free(sequence)
        assert self.manager.num_used == 0
        assert self.manager.check_integrity() == []


class HomesMachine(BlockMachine):
    """Also: a router's tree has each block in the home that it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree()

    def told(self, events: list[KvEvent]) -> None:
        for event in events:
            self.tree.apply(WORKER, event)
        block_of = self.manager.cache.table.block_of
        first_copy = self.NUM_BLOCKS + self.NUM_SLOTS
        truth = {name: (block >= self.NUM_BLOCKS) + (block >= first_copy) for name, block in block_of.items()}
        assert self.replica.homes == homes(self.manager.cache.runs()) == homes(self.tree.dump(WORKER)) == truth


class TieredBlockMachine(HomesMachine):
    NUM_BLOCKS = 6
    NUM_SLOTS = 5


class LateBlockMachine(HomesMachine):
    """Copies to and from the lower tier are made late: anything may happen to the blocks before."""

    NUM_BLOCKS = 6
    NUM_SLOTS = 5
    SLOTS = LateSlots

    @property
    def moves(self) -> list[LateMove]:
        assert isinstance(self.tier, LateSlots)
        return self.tier.moves

    def begin(self, sequence: Sequence) -> None:
        if not sequence.moves:
            super().begin(sequence)
        elif not self.manager.tiers.is_moving(sequence):  # only its hit is: a peer writes the other blocks at once
            for block in sequence.block_table[sequence.num_committed_blocks :]:
                self.content[block] = ()

    def await_moves(self, sequence: Sequence) -> None:
        if sequence.moves:
            super().await_moves(sequence)
            if sequence.num_computed_tokens == sequence.num_committed_blocks * self.BLOCK_SIZE:
                super().begin(sequence)

    @precondition(lambda self: self.moves)
    @rule(count=st.integers(1, 3), land=st.booleans())
    def copies_are_made(self, count: int, land: bool) -> None:
        for _ in range(min(count, len(self.moves))):
            self.tier.work()  # type: ignore[union-attr]
        if land:
            self.manager.land()

    @rule()
    def a_step_begins(self) -> None:
        self.manager.land()

    @precondition(lambda self: not self.sequences)
    @rule()
    def vacate(self) -> None:
        self.manager.vacate()
        while self.moves:
            self.tier.work()  # type: ignore[union-attr]
        self.content.clear()


class DiskBlockMachine(HomesMachine):
    """A disk below, whose reads and writes end late, in any order of the two, fail, or find what they wrote damaged. A
    process that dies loses its memory, and finds whole prefixes again."""

    NUM_BLOCKS = 6
    NUM_SLOTS = 4
    NUM_COPIES = 7

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Sequence] = []

    @property
    def files(self) -> Disk:
        assert self.disk is not None
        return self.disk

    @rule(some=st.lists(prompts, min_size=1, max_size=6), works=st.booleans(), hint=hints)
    def serve(self, some: list[list[int]], works: bool, hint: CacheHint) -> None:
        """Whole requests, one after the other."""
        for tokens in some:
            sequence = self.new_sequence(tokens, pinned=False)
            sequence.hint = hint
            while works and self.manager.tiers.restores(sequence):
                self.disk_works_off_everything()
            if not self.manager.tiers.restores(sequence) and self.allocate_to(sequence, 0):
                self.compute_everything(-1)
                self.free(-1, ends=True)
            self.manager.tiers.forgo(sequence)

    @rule(often=often)
    def clear(self, often: bool) -> None:  # type: ignore[override]
        if not often:
            super().clear()
            self.waiting.clear()

    @precondition(lambda self: not self.sequences)
    @rule(often=often)
    def vacate(self, often: bool) -> None:  # type: ignore[override]
        if not often:
            super().vacate()

    @rule(often=often)
    def flush(self, often: bool) -> None:
        if not often and not self.sequences:
            self.content_on_disk()

    def content_on_disk(self) -> None:
        """Everything in memory gets to the disk, as far as it has room."""
        self.files.max_writes = 2
        while self.manager.tiers.flush():
            self.disk_works_off_everything()
        cache = self.manager.cache
        if not self.waiting and not cache.copies.reads:  # a read that nobody awaits any more holds its slot
            assert len(cache.copies.of) == min(len(cache.table.block_of), self.NUM_COPIES)

    @rule(tokens=prompts, pinned=st.booleans())
    def restore(self, tokens: list[int], pinned: bool) -> None:
        sequence = self.new_sequence(tokens, pinned)
        if self.manager.tiers.restores(sequence):
            assert not self.files.late
            self.waiting.append(sequence)

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, 99), keep=st.integers(0, 3))
    def wait_no_more(self, index: int, keep: int) -> None:
        sequence = self.waiting[index % len(self.waiting)]
        if self.manager.tiers.restores(sequence):
            return
        self.waiting.remove(sequence)
        if not self.allocate_to(sequence, keep):
            self.manager.tiers.forgo(sequence)

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, 99))
    def forgo(self, index: int) -> None:
        self.manager.tiers.forgo(self.waiting.pop(index % len(self.waiting)))

    @rule(
        works=st.lists(st.tuples(st.booleans(), st.sampled_from([True, True, False])), min_size=1, max_size=4),
        land=st.booleans(),
    )
    def disk_works(self, works: list[tuple[bool, bool]], land: bool) -> None:
        for writes, ok in works:
            self.files.work(writes, ok)
        if land:
            self.manager.land()

    @rule()
    def disk_works_off_everything(self) -> None:
        self.files.finish()
        self.manager.land()

    @precondition(lambda self: self.files.files)
    @rule(index=st.integers(0, 99))
    def tear(self, index: int) -> None:
        self.files.files.pop(list(self.files.files)[index % len(self.files.files)])

    @rule(late=often.map(lambda often: not often), max_writes=st.integers(0, 3))
    def disk_changes(self, late: bool, max_writes: int) -> None:
        self.files.late, self.files.max_writes = late, max_writes
        self.manager.land()
        assert not late or not any(self.manager.tiers.restores(sequence) for sequence in self.waiting)

    @rule(often=often, works=st.booleans())
    def process_dies(self, often: bool, works: bool) -> None:
        if often:
            return
        if works:
            self.files.finish()
        files = dict(self.files.files)
        self.content.clear()
        self.manager = self.made_manager([(copy, block) for copy, (block, _) in reversed(files.items())])
        self.files.files = files
        self.sequences, self.waiting, self.replica, self.tree = [], [], EventReplica(), RadixTree()
        whole = [block for copy, (block, _) in files.items() if copy < self.NUM_COPIES]
        parents = {block.sequence_hash: block.parent for block in whole}
        while orphans := {one for one, above in parents.items() if above is not None and above not in parents}:
            for one in orphans:
                del parents[one]
        assert snapshot(self.manager) == parents

    def teardown(self) -> None:
        for sequence in self.waiting:
            self.manager.tiers.forgo(sequence)
        self.files.finish()
        self.manager.land()
        super().teardown()


class LateDiskBlockMachine(LateBlockMachine, DiskBlockMachine):
    """Copies are made late above a disk whose reads and writes end late."""

    NUM_SLOTS = 4

    @precondition(lambda self: not self.sequences)
    @rule(often=often)
    def vacate(self, often: bool) -> None:  # type: ignore[override]
        if not often:
            super().vacate()


def few_and_many(machine: type[BlockMachine], many: int, steps: int) -> tuple[type[TestCase], type[TestCase]]:
    """The machine's tests: with a few examples, and with many, which is slow."""

    class Few(machine.TestCase):  # type: ignore[name-defined,misc]
        settings = settings(max_examples=many // 10, stateful_step_count=steps, deadline=None)

    @pytest.mark.slow
    class Many(machine.TestCase):  # type: ignore[name-defined,misc]
        settings = settings(max_examples=many, stateful_step_count=steps, deadline=None)

    return Few, Many
