"""Random traffic against a block manager, whose oracle is a dict of what each block holds."""

from collections.abc import Sequence as Run

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.core.block_manager import BlockManager
from engine.core.sequence import Sequence
from tests.engine.kv_oracle import EventReplica, make_sequence, snapshot


def compute(manager: BlockManager, sequence: Sequence, num_tokens: int | None = None) -> None:
    sequence.num_computed_tokens = sequence.num_tokens if num_tokens is None else num_tokens
    manager.commit(sequence)


# Long shared beginnings and short tails that differ: hits of every depth, duplicates, and forks.
prompts = st.builds(
    lambda root, shared, tail: [root] * shared + tail,
    root=st.integers(2, 3),
    shared=st.integers(1, 11),
    tail=st.lists(st.integers(0, 1), max_size=3),
)


class Slots:
    """A lower tier of the oracle's dict."""

    def __init__(self, num_slots: int, content: dict[int, tuple[int, ...]]) -> None:
        self.num_slots = num_slots
        self._content = content
        self._slots: dict[int, tuple[int, ...]] = {}

    def store(self, blocks: Run[int], slots: Run[int]) -> None:
        assert len(set(slots)) == len(slots) == len(blocks)
        for block, slot in zip(blocks, slots, strict=True):
            assert 0 <= slot < self.num_slots
            self._slots[slot] = self._content[block]

    def load(self, slots: Run[int], blocks: Run[int]) -> None:
        for slot, block in zip(slots, blocks, strict=True):
            self._content[block] = self._slots[slot]


class BlockMachine(RuleBasedStateMachine):
    """Random traffic. The oracle is a dict of what each block's content is, and who holds it."""

    BLOCK_SIZE = 2
    NUM_BLOCKS = 9
    NUM_SLOTS = 0

    def __init__(self) -> None:
        super().__init__()
        self.content: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end, when computed and full
        tier = Slots(self.NUM_SLOTS, self.content) if self.NUM_SLOTS else None
        self.manager = BlockManager(self.NUM_BLOCKS, self.BLOCK_SIZE, tier)
        self.replica = EventReplica()
        self.sequences: list[Sequence] = []
        self.names = 0

    def pick(self, index: int) -> Sequence:
        return self.sequences[index % len(self.sequences)]

    @rule(tokens=prompts, pinned=st.booleans(), keep=st.integers(0, 3))
    def allocate(self, tokens: list[int], pinned: bool, keep: int) -> None:
        self.names += 1
        sequence = make_sequence(str(self.names), tokens, prefill_only=pinned, pinned=pinned)
        cached = snapshot(self.manager)
        before = (self.manager.num_free, self.manager.num_cached, cached)
        available = self.manager.num_available
        referenced = {h for s in self.sequences for h in s.sequence_hashes[: s.num_committed_blocks]}
        limit = (len(tokens) - 1) // self.BLOCK_SIZE
        sequence.hash_blocks(limit, self.BLOCK_SIZE)
        hashes = sequence.sequence_hashes
        depth = next((i for i in range(limit) if hashes[i] not in cached), limit)
        missing = self.manager.blocks_for(len(tokens)) - len(referenced.intersection(hashes[:depth]))
        fits = self.manager.allocate(sequence, keep_available=keep)
        assert fits == (missing + keep <= available)
        if fits:
            self.sequences.append(sequence)
            for block in sequence.block_table[depth:]:
                self.content[block] = ()  # whoever holds it may write it
            assert self.manager.num_available == available - missing
            assert sequence.num_computed_tokens == depth * self.BLOCK_SIZE
            for i in range(depth):  # a hit really holds these tokens
                assert self.content[sequence.block_table[i]] == tuple(tokens[: (i + 1) * self.BLOCK_SIZE])
        else:
            assert before == (self.manager.num_free, self.manager.num_cached, snapshot(self.manager))
        self.check_fresh_blocks(sequence)

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
    @rule(index=st.integers(0, 99))
    def free(self, index: int) -> None:
        sequence = self.pick(index)
        self.sequences.remove(sequence)
        self.manager.free(sequence)
        assert sequence.block_table == []
        self.manager.free(sequence)  # a second time does nothing

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
        for sequence in self.sequences:
            for i in range(sequence.num_computed_tokens // self.BLOCK_SIZE):
                assert self.content[sequence.block_table[i]] == tuple(sequence.token_ids[: (i + 1) * self.BLOCK_SIZE])

    @rule()
    def events_tell_exactly_what_is_cached(self) -> None:
        self.replica.apply(self.manager.take_events())
        assert self.replica.parents == snapshot(self.manager)

    def teardown(self) -> None:
        self.events_tell_exactly_what_is_cached()
        for sequence in self.sequences:
            self.manager.free(sequence)
        assert self.manager.num_used == 0
        assert self.manager.check_integrity() == []


class TieredBlockMachine(BlockMachine):
    NUM_BLOCKS = 6
    NUM_SLOTS = 5
