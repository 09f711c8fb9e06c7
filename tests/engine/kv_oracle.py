"""A deterministic model for engine tests, whose KV can be checked, and the sequential answer that it must give.

The "KV" of a position is a hash of all tokens up to it; the next token is a function of the last one. The runner reads
the KV of the whole context through the block table, so any block that was freed too early, shared wrongly or not
computed shows at once.
"""

from collections.abc import Iterable

import numpy as np

from baton_proto.kv_events import Cleared, KvEvent, Moved, Removed, Stored
from baton_proto.sampling import SamplingParams
from engine.blocks.block_manager import BlockManager
from engine.blocks.window_blocks import NOWHERE, most_held
from engine.core.engine import Engine
from engine.drafts.drafter import Drafter
from engine.sequences.batch import Batch, LayerDone, SampledToken, ScheduledSequence
from engine.sequences.sequence import PENDING, Sequence

VOCAB = 60
EOS = frozenset({7, 11})


def make_sequence(
    request_id: str,
    tokens: Iterable[int],
    *,
    max_tokens: int = 8,
    num_prompt_tokens: int | None = None,
    priority: int = 0,
    prefill_only: bool = False,
    pinned: bool = False,
    **sampling: object,
) -> Sequence:
    token_ids = list(tokens)
    return Sequence(
        request_id,
        token_ids,
        len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling),  # type: ignore[arg-type]
        priority=priority,
        prefill_only=prefill_only,
        pinned=pinned,
    )


def prefix_hashes(tokens: list[int]) -> list[int]:
    hashes, value = [], 1
    for token in tokens:
        value = (value * 1_000_003 + token + 1) % (2**61 - 1)
        hashes.append(value)
    return hashes


def next_token(tokens: list[int]) -> int:
    return (prefix_hashes(tokens)[-1] >> 7) % VOCAB


def sequential_answer(prompt: list[int], max_tokens: int) -> list[int]:
    """Output of the model for a prompt that is alone in the world, EOS included."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] in EOS:
            break
    return tokens[len(prompt) :]


class FakeSlab:
    """(block, slot) -> prefix hash"""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.values: dict[tuple[int, int], int] = {}

    def at(self, table: list[int], position: int) -> tuple[int, int]:
        return table[position // self.block_size], position % self.block_size

    def write(self, table: list[int], tokens: list[int], start: int, end: int) -> None:
        hashes = prefix_hashes(tokens[:end])
        for position in range(start, end):
            self.values[self.at(table, position)] = hashes[position]

    def check(self, table: list[int], tokens: list[int], end: int, first: int = 0) -> None:
        for position, expected in list(enumerate(prefix_hashes(tokens[:end])))[first:]:
            assert self.values.get(self.at(table, position)) == expected, f"wrong KV at position {position}"


class FakeStep:
    """A step whose KV is read and written when it runs, with the block tables that it was submitted with."""

    def __init__(self, runner: "FakeRunner", batch: Batch) -> None:
        self._runner = runner
        self._items = [
            (item, list(item.sequence.block_table), list(item.sequence.window_table), runner.known_tokens(item))
            for item in batch.items
        ]
        self._sampled: list[SampledToken] | None = None

    def run(self) -> None:
        if self._sampled is not None:
            return
        slab, self._sampled = self._runner.slab, []
        window, sliding = self._runner.window, self._runner.sliding
        for item, table, window_table, tokens in self._items:
            slab.write(table, tokens, item.start, item.end)
            if window:
                sliding.write(window_table, tokens, item.start, item.end)
        for item, table, window_table, tokens in self._items:
            slab.check(table, tokens, item.end)
            if window:
                sliding.check(window_table, tokens, item.end, max(0, item.start - window + 1))
                assert all(place != NOWHERE for place, _ in sliding.values)
            for end in range(len(tokens) - item.num_samples, len(tokens)):
                self._sampled.append(SampledToken(next_token(tokens[: end + 1]), None))

    def draw(self) -> None:
        pass

    def tokens(self) -> list[SampledToken]:
        self.run()
        assert self._sampled is not None
        return self._sampled


class FakeRunner:
    """With depth 1 and no one who watches layers, a step runs when it has to: when its tokens are asked for."""

    num_layers = 2

    def __init__(self, block_size: int, depth: int = 0, window: int = 0) -> None:
        """window: of layers that have blocks of their own; 0: there are none."""
        self.depth = depth
        self.window = window
        self.slab = FakeSlab(block_size)
        self.sliding = FakeSlab(block_size)
        self.batches: list[Batch] = []
        self.computed: dict[str, int] = {}  # tokens by request id
        self.failure: Exception | None = None
        self._pending: dict[Sequence, int] = {}  # what the last step sampled, as the device knows it

    def submit(self, batch: Batch, layer_done: LayerDone | None) -> FakeStep:
        self.batches.append(batch)
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        for item in batch.items:
            sequence = item.sequence
            assert item.start == sequence.num_scheduled_tokens
            assert item.num_tokens > 0
            assert item.sample == (item.end == sequence.num_tokens)
            self.computed[sequence.request_id] = self.computed.get(sequence.request_id, 0) + item.num_tokens
        step = FakeStep(self, batch)
        self._pending = {item.sequence: next_token(self.known_tokens(item)) for item in batch.items if item.sample}
        if layer_done is not None or self.depth == 0:
            step.run()
        if layer_done is not None:
            for layer in range(self.num_layers):
                layer_done(layer)
        return step

    def known_tokens(self, item: ScheduledSequence) -> list[int]:
        tokens = item.sequence.token_ids[: item.end]
        if tokens[-1] == PENDING:
            tokens[-1] = self._pending[item.sequence]
        assert PENDING not in tokens
        return tokens


def make_engine(
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    max_batch_tokens: int = 32,
    max_running: int = 8,
    depth: int = 0,
    drafter: Drafter | None = None,
    window: int = 0,
    spare_places: int = 0,
) -> tuple[Engine, FakeRunner]:
    """spare_places: of layers with that window, beside those that one sequence needs."""
    runner = FakeRunner(block_size, depth, window)
    places = 1 + most_held(window, block_size) + spare_places if window else 0
    engine = Engine(
        runner,
        BlockManager(num_blocks, block_size, window=window, num_window_blocks=places),
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        eos_token_ids=EOS,
        drafter=drafter,
    )
    return engine, runner


def u64(data: bytes) -> list[int]:
    return [int(value) for value in np.frombuffer(data, dtype="<u8")]


class EventReplica:
    """What a router knows of the cache: sequence hash -> parent, and home. Refuses events that break the stream's
    promises."""

    def __init__(self) -> None:
        self.parents: dict[int, int | None] = {}
        self.homes: dict[int, int] = {}

    def apply(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            match event:
                case Stored():
                    parent = event.parent
                    for sequence_hash in u64(event.sequence_hashes):
                        assert parent is None or parent in self.parents, "stored below an unknown parent"
                        assert sequence_hash not in self.parents, "stored twice"
                        assert parent is None or self.homes[parent] <= event.home, "stored nearer than its parent"
                        self.parents[sequence_hash], self.homes[sequence_hash] = parent, event.home
                        parent = sequence_hash
                case Removed():
                    for sequence_hash in u64(event.sequence_hashes):
                        assert sequence_hash not in self.parents.values(), "removed before its child"
                        del self.parents[sequence_hash], self.homes[sequence_hash]
                case Moved():
                    for sequence_hash in u64(event.sequence_hashes):
                        above = self.parents[sequence_hash]
                        assert above is None or self.homes[above] <= event.home, "came nearer than its parent"
                        self.homes[sequence_hash] = event.home
                case Cleared():
                    self.parents.clear()
                    self.homes.clear()
        for sequence_hash, above in self.parents.items():
            assert above is None or self.homes[above] <= self.homes[sequence_hash], "nearer than its parent"


def snapshot(manager: BlockManager) -> dict[int, int | None]:
    """runs() replayed: it must be applicable in its own order."""
    replica = EventReplica()
    replica.apply(manager.cache.runs())
    return replica.parents
