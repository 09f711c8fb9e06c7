"""An engine over a slab of transfers whose running sequences want more blocks than there are, so that it preempts."""

import itertools
import random
from typing import Protocol

from baton_proto.sampling import SamplingParams
from engine.blocks.block_manager import BlockManager
from engine.core.engine import Engine
from engine.sequences.batch import Batch, LayerDone, SampledToken, StepDone
from engine.sequences.sequence import Sequence
from kvtransfer.slab.slab import Slab

POOL_BLOCKS = 64
MAX_STEPS = 10_000


class WritableSlab(Protocol):
    slab: Slab

    def fill_block(self, block: int) -> None: ...


class WritingRunner:
    """Writes at random into every block that a step computes."""

    depth = 0

    def __init__(self, ours: WritableSlab) -> None:
        self.num_layers = ours.slab.layout.num_layers
        self._ours = ours
        self._tokens = itertools.count(1)

    def submit(self, batch: Batch, layer_done: LayerDone | None) -> StepDone:
        size = self._ours.slab.layout.block_size
        for item in batch.items:
            for block in item.sequence.block_table[item.start // size : -(-item.end // size)]:
                self._ours.fill_block(block)
        return StepDone([SampledToken(next(self._tokens), None) for item in batch.items if item.sample])


class CrowdedEngine:
    def __init__(self, ours: WritableSlab) -> None:
        self._size = ours.slab.layout.block_size
        self._engine = Engine(
            WritingRunner(ours),
            BlockManager(POOL_BLOCKS, self._size),
            max_batch_tokens=POOL_BLOCKS * self._size,
            max_running=8,
            eos_token_ids=frozenset(),
        )
        self._random = random.Random(1)
        self._names = map(str, itertools.count())

    def reserve(self, num_blocks: int) -> list[int]:
        """The blocks of a prompt that a prefill worker computes."""
        sequence = self._sequence(num_blocks, pinned=False)
        assert self._engine.reserve(sequence)
        return sequence.block_table

    def prompt(self, num_blocks: int) -> list[int]:
        """The blocks of a prompt that is computed here and then shipped."""
        sequence = self._sequence(num_blocks, pinned=True)
        self._engine.add(sequence)
        while not any(output.finish == "prefill" for output in self._engine.step().outputs):
            pass
        return sequence.block_table

    def crowd(self) -> int:
        """Steps until some sequences were preempted. Returns how many."""
        for _ in range(MAX_STEPS):
            if len(self._engine.scheduler.waiting) + len(self._engine.scheduler.running) < 12:
                self._engine.add(self._sequence(5, pinned=False))
            self._engine.step()
            assert self._engine.check_integrity() == []
            if self._engine.scheduler.num_preemptions >= 8:
                break
        return self._engine.scheduler.num_preemptions

    def _sequence(self, num_blocks: int, *, pinned: bool) -> Sequence:
        tokens = [self._random.randrange(1 << 30) for _ in range(num_blocks * self._size - 2)]
        sampling = SamplingParams(max_tokens=20 * self._size, temperature=0.0)
        return Sequence(next(self._names), tokens, len(tokens), sampling, prefill_only=pinned, pinned=pinned)
