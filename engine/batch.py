"""What one step computes: the contract between scheduler, runner and engine."""

from collections.abc import Callable, Sequence as Run
from dataclasses import dataclass
from typing import Protocol

from baton_proto.sampling import TokenLogprobs
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """`num_tokens` tokens of `sequence` from `start` (= its num_computed_tokens) on go through the model this step.

    `sample`: the last of them is the last known token, so a new token is sampled after it.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    sample: bool

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompt chunks first, then decodes (exactly one token each): attention is split by phase at `len(prefill)`."""

    prefill: list[ScheduledSequence]
    decode: list[ScheduledSequence]

    @property
    def items(self) -> list[ScheduledSequence]:
        return self.prefill + self.decode

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.prefill) + len(self.decode)


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None


LayerDone = Callable[[int], None]
"""Called on the engine thread after the KV of a layer was written for the whole batch (on a GPU: enqueued)."""


class Runner(Protocol):
    """Runs a batch. The model runner is one; the mock engine's is another."""

    num_layers: int

    def run(self, batch: Batch, layer_done: LayerDone | None) -> Run[SampledToken]:
        """One SampledToken per item with `sample` set, in the order of `batch.items`. Writes KV into the slab."""
        ...
