"""Random traffic against a block manager, whose oracle is a dict of what each block holds."""

from collections.abc import Callable, Iterable, MutableMapping, Sequence as Run
from functools import partial
from math import inf

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton_proto.kv_events import KvEvent, Stored
from baton_proto.worker import NO_HINT, CacheHint
from engine.core.block_manager import BlockManager, Checksums
from engine.core.disk_copies import DiskBlock, Done
from engine.core.moves import BEFORE_STEP, Move
from engine.core.sequence import Sequence, SequenceStatus
from router.index.radix_tree import RadixTree
from tests.engine.kv_oracle import EventReplica, make_sequence, snapshot, u64

WORKER = ("w", 1)


def compute(manager: BlockManager, sequence: Sequence, num_tokens: int | None = None) -> None:
    sequence.num_computed_tokens = sequence.num_tokens if num_tokens is None else num_tokens
    manager.commit(sequence)


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


class Slots:
    """A lower tier of the oracle's dict."""

    spare = 0
    checksums: Checksums | None = None

    def __init__(self, num_slots: int, content: MutableMapping[int, tuple[int, ...]]) -> None:
        self.num_slots = num_slots
        self._content = content
        self._slots: dict[int, tuple[int, ...]] = {}

    def store(self, blocks: Run[int], slots: Run[int]) -> Move | None:
        assert len(set(slots)) == len(slots) == len(blocks)
        for block, slot in zip(blocks, slots, strict=True):
            assert 0 <= slot < self.num_slots
            self._slots[slot] = self._content[block]
        return None

    def load(self, slots: Run[int], blocks: Run[int]) -> Move | None:
        for slot, block in zip(slots, blocks, strict=True):
            self._content[block] = self._slots[slot]
        return None

    def load_s(self, num_blocks: int) -> float:
        return 0.0

    def close(self) -> None:
        """Nothing to do."""

    def is_late(self, slot: int) -> bool:
        """Whether copies to or from it are still to be made."""
        return False

    def __getitem__(self, slot: int) -> tuple[int, ...]:
        return self._slots[slot]

    def __setitem__(self, slot: int, content: tuple[int, ...]) -> None:
        self._slots[slot] = content


class LateSlots(Slots):
    """Copies are made when somebody waits for them, or `work` is called; they are enqueued at once, or by `enqueue`
    when the tier is slow."""

    spare = 2

    def __init__(self, num_slots: int, content: MutableMapping[int, tuple[int, ...]], slow: bool = False) -> None:
        super().__init__(num_slots, content)
        self.moves: list[LateMove] = []
        self.enqueued: list[LateMove] = self.moves  # and not made
        if slow:
            self.enqueued = []

    def store(self, blocks: Run[int], slots: Run[int]) -> Move | None:
        return self._later(super().store, blocks, slots, slots)

    def load(self, slots: Run[int], blocks: Run[int]) -> Move | None:
        return self._later(super().load, slots, blocks, slots)

    def _later(self, copy: Callable[..., object], sources: Run[int], targets: Run[int], slots: Run[int]) -> Move:
        self.moves.append(LateMove(self, partial(copy, list(sources), list(targets)), frozenset(slots)))
        return self.moves[-1]

    def is_late(self, slot: int) -> bool:
        return any(slot in move.of for move in self.moves)

    def __getitem__(self, slot: int) -> tuple[int, ...]:
        self._await(slot)
        return super().__getitem__(slot)

    def __setitem__(self, slot: int, content: tuple[int, ...]) -> None:
        self._await(slot)
        super().__setitem__(slot, content)

    def _await(self, slot: int) -> None:
        while self.is_late(slot):
            self.work()

    def enqueue(self) -> None:
        self.enqueued.append(self.moves[len(self.enqueued)])

    def work(self) -> None:
        """Makes the oldest copies."""
        if not self.enqueued:
            self.enqueue()
        move = self.moves.pop(0)
        if self.enqueued is not self.moves:
            self.enqueued.pop(0)
        move.copy()


class LateMove:
    def __init__(self, slots: LateSlots, copy: Callable[[], object], of: frozenset[int]) -> None:
        self.copy = copy
        self.of = of  # slots
        self._slots = slots

    def is_enqueued(self) -> bool:
        return self in self._slots.enqueued or self not in self._slots.moves

    def left_s(self) -> float:
        return float(self in self._slots.moves)

    def before(self, layer: int) -> None:
        if layer == BEFORE_STEP:
            self.wait()

    def then(self, wake: Callable[[], object]) -> None:
        """Whoever works calls `land` afterwards."""

    def wait(self) -> None:
        while self in self._slots.moves:
            self._slots.work()


class Disk:
    """Files of the oracle's dict, which are read and written when `work` is called, and come to nothing if it says so.
    Invariant: nobody touches a host slot from the beginning of a read or write to its end. Copies of the slot that were
    asked for before are waited for at the end."""

    def __init__(self, num_slots: int, slots: Slots) -> None:
        self.num_slots = num_slots
        self.max_writes = 2
        self.num_errors = 0
        self.wake: Callable[[], object] = lambda: None
        self.late = False
        self.files: dict[int, tuple[DiskBlock, tuple[int, ...]]] = {}  # the last one is the youngest
        self._slots = slots
        self._writes: list[tuple[int, int, DiskBlock, tuple[int, ...] | None]] = []
        self._reads: list[tuple[int, int, DiskBlock, bool]] = []
        self._done: list[Done] = []

    def write(self, slot: int, copy: int, block: DiskBlock) -> None:
        assert 0 <= copy < self.num_slots
        self._writes.append((slot, copy, block, None if self._slots.is_late(slot) else self._slots[slot]))

    def read(self, copy: int, slot: int, block: DiskBlock) -> None:
        if is_marked := not self._slots.is_late(slot):
            self._slots[slot] = (-1,)
        self._reads.append((copy, slot, block, is_marked))

    def done(self) -> list[Done]:
        done, self._done = self._done, []
        return done

    def read_s(self, num_blocks: int) -> float:
        return inf if self.late else 0.1

    def wipe(self) -> None:
        while self._writes:
            self.work(True, True)
        self.files.clear()

    def close(self) -> None:
        self.finish()

    def work(self, writes: bool, ok: bool) -> None:
        """Ends the oldest write or read."""
        if writes and self._writes:
            slot, copy, block, before = self._writes.pop(0)
            content = self._slots[slot]
            assert before in (None, content), "a host slot was used while it was being written"
            self.files.pop(copy, None)
            if ok:
                self.files[copy] = block, content
            self._done.append(Done(copy, True, ok))
        elif not writes and self._reads:
            copy, slot, block, is_marked = self._reads.pop(0)
            assert not is_marked or self._slots[slot] == (-1,), "a host slot was used while it was being read into"
            found, content = self.files.get(copy, (None, ()))
            assert found is None or found._replace(kind=0) == block._replace(kind=0)
            self._slots[slot] = content if ok and found else (-1,)
            self._done.append(Done(copy, False, ok and found is not None))

    def finish(self) -> bool:
        """Whether there was anything to do."""
        busy = bool(self._reads or self._writes)
        while self._reads or self._writes:
            self.work(not self._reads, True)
        return busy


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
        tier = self.SLOTS(self.NUM_SLOTS, self.content) if self.NUM_SLOTS else None
        self.tier = tier
        self.disk = Disk(self.NUM_COPIES, tier) if self.NUM_COPIES and tier is not None else None
        self.manager = BlockManager(self.NUM_BLOCKS, self.BLOCK_SIZE, tier, self.disk)
        self.replica = EventReplica()
        self.sequences: list[Sequence] = []
        self.names = 0
        self.now_s = 0

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
        if self.disk is not None:  # what lies on the disk alone does not count
            depth = min(depth, self.manager.cached_tokens(sequence) // self.BLOCK_SIZE)
        missing = self.manager.blocks_for(len(tokens)) - len(referenced.intersection(hashes[:depth]))
        fits = self.manager.allocate(sequence, keep_available=keep)
        assert fits == (missing + keep <= available)
        if fits:
            self.sequences.append(sequence)
            assert self.manager.num_available == available - missing
            assert sequence.num_computed_tokens == depth * self.BLOCK_SIZE
            self.begin(sequence)
        else:
            assert before == (self.manager.num_free, self.manager.num_cached, snapshot(self.manager))
        self.check_fresh_blocks(sequence)
        return fits

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
        self.await_moves(sequence)
        end = min(sequence.num_tokens, sequence.num_computed_tokens + num_tokens)
        for i in range(sequence.num_computed_tokens // self.BLOCK_SIZE, end // self.BLOCK_SIZE):
            self.content[sequence.block_table[i]] = tuple(sequence.token_ids[: (i + 1) * self.BLOCK_SIZE])
        sequence.num_computed_tokens = end
        self.manager.commit(sequence)

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0, 99), token=st.integers(0, 1))
    def append(self, index: int, token: int) -> None:
        sequence = self.pick(index)
        if sequence.num_computed_tokens != sequence.num_tokens:
            return
        sequence.token_ids.append(token)
        available = self.manager.num_available
        missing = self.manager.blocks_for(sequence.num_tokens) - len(sequence.block_table)
        if self.manager.append(sequence):
            assert missing <= available
            self.check_fresh_blocks(sequence)
        else:
            assert missing > available
            sequence.token_ids.pop()

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
        assert self.manager.num_cached == self.manager.num_lowered == 0

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
        events = self.manager.take_events()
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
        block_of = self.manager._cache._block_of
        first_copy = self.NUM_BLOCKS + self.NUM_SLOTS
        truth = {name: (block >= self.NUM_BLOCKS) + (block >= first_copy) for name, block in block_of.items()}
        assert self.replica.homes == homes(self.manager.runs()) == homes(self.tree.dump(WORKER)) == truth


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
        elif not self.manager.is_moving(sequence):  # only its hit is: a peer writes the other blocks at once
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
            while works and self.manager.restores(sequence):
                self.disk_works_off_everything()
            if not self.manager.restores(sequence) and self.allocate_to(sequence, 0):
                self.compute_everything(-1)
                self.free(-1, ends=True)
            self.manager.forgo(sequence)

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
        while self.manager.flush():
            self.disk_works_off_everything()
        cache = self.manager._cache
        if not self.waiting:
            assert len(cache.copies.of) == min(len(cache), self.NUM_COPIES)

    @rule(tokens=prompts, pinned=st.booleans())
    def restore(self, tokens: list[int], pinned: bool) -> None:
        sequence = self.new_sequence(tokens, pinned)
        if self.manager.restores(sequence):
            assert not self.files.late
            self.waiting.append(sequence)

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, 99), keep=st.integers(0, 3))
    def wait_no_more(self, index: int, keep: int) -> None:
        sequence = self.waiting[index % len(self.waiting)]
        if self.manager.restores(sequence):
            return
        self.waiting.remove(sequence)
        if not self.allocate_to(sequence, keep):
            self.manager.forgo(sequence)

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, 99))
    def forgo(self, index: int) -> None:
        self.manager.forgo(self.waiting.pop(index % len(self.waiting)))

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
        assert not late or not any(self.manager.restores(sequence) for sequence in self.waiting)

    @rule(often=often, works=st.booleans())
    def process_dies(self, often: bool, works: bool) -> None:
        if often:
            return
        if works:
            self.files.finish()
        files = dict(self.files.files)
        self.tier = slots = self.SLOTS(self.NUM_SLOTS, self.content)
        self.content.clear()
        self.disk = Disk(self.NUM_COPIES, slots)
        self.disk.files = files
        found = [(copy, block) for copy, (block, _) in reversed(files.items())]
        self.manager = BlockManager(self.NUM_BLOCKS, self.BLOCK_SIZE, slots, self.disk, found)
        self.sequences, self.waiting, self.replica, self.tree = [], [], EventReplica(), RadixTree()
        parents = {block.sequence_hash: block.parent for block, _ in files.values()}
        while orphans := {one for one, above in parents.items() if above is not None and above not in parents}:
            for one in orphans:
                del parents[one]
        assert snapshot(self.manager) == parents

    def teardown(self) -> None:
        for sequence in self.waiting:
            self.manager.forgo(sequence)
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
