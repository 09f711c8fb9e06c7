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


class StepOnItsWay(Protocol):
    """A submitted step. Its KV is written before that of any step submitted later."""

    def tokens(self) -> Run[SampledToken]:
        """Waits for the step. One SampledToken per item with `sample` set, in the order of `batch.items`."""
        ...


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step that had ended when `submit` returned."""

    sampled: Run[SampledToken]

    def tokens(self) -> Run[SampledToken]:
        return self.sampled


class Runner(Protocol):
    """Runs batches. The model runners are some; the mock engine's is another.

    A runner of depth 1 takes a step while the one before is still on its way. The token that a sequence waits for is
    then `PENDING` in its token ids: the runner knows it before anyone else.
    """

    num_layers: int
    depth: int  # steps that may be on their way when another one is submitted; 0: none

    def submit(self, batch: Batch, layer_done: LayerDone | None) -> StepOnItsWay:
        """Starts the step. Writes KV into the slab."""
        ...
