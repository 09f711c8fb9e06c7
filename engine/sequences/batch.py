"""What one step computes: the contract between scheduler, runner and engine.

The values are Structs because every step makes many, and a frozen dataclass takes ten times as long.
"""

import itertools
from collections.abc import Callable, Sequence as Run
from typing import Protocol

from msgspec import Struct

from baton_proto.sampling import TokenLogprobs
from engine.sequences.moves import Move
from engine.sequences.sequence import Sequence, TokenScores


class ScheduledSequence(Struct, frozen=True):
    """`num_tokens` tokens of `sequence`, from `start` on, go through the model in this step.

    `sample`: the last of them is the sequence's last token, so a new token is sampled after it. `draft`: so many of
    them, at the end, are guesses, each of which is verified by what is sampled after the token before.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    sample: bool
    draft: Run[int] = ()

    @property
    def num_samples(self) -> int:
        """Rows of logits, one after each of the last tokens."""
        return self.sample + len(self.draft)

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def scored(self) -> range:
        """Positions of this step's tokens after each of which the log-probability of the prompt's next token is asked
        for."""
        sequence, last = self.sequence, self.sequence.num_prompt_tokens - 1
        return range(max(self.start, last - sequence.num_unscored), min(self.end, last))


class Batch:
    """Prompt chunks, then decodes with drafts, then decodes of one token each. Attention takes the former two,
    `chunks`, as it takes prompts, unless a GPU takes the drafts as decodes (engine/cuda/step_inputs.py).

    `scored`: the chunks with log-probabilities of the prompt's tokens, and the positions in the sequence that give
    them.
    """

    __slots__ = ("chunks", "decode", "drafted", "items", "num_tokens", "prefill", "scored")

    def __init__(
        self,
        prefill: list[ScheduledSequence],
        decode: list[ScheduledSequence],
        drafted: list[ScheduledSequence] | None = None,
    ) -> None:
        self.prefill = prefill
        self.drafted = drafted or []
        self.decode = decode
        self.chunks = prefill + self.drafted
        self.items = self.chunks + decode
        self.num_tokens = sum([item.num_tokens for item in self.chunks]) + len(decode)
        self.scored = [(item, rows) for item in prefill if item.sequence.num_unscored and (rows := item.scored)]

    def moves(self) -> list[Move]:
        """The moves of its sequences' blocks, each once."""
        waited = [item.sequence.moves for item in self.items if item.sequence.moves]
        return list(dict.fromkeys(itertools.chain.from_iterable(waited)))


class SampledToken(Struct, frozen=True):
    token_id: int
    logprobs: TokenLogprobs | None


LayerDone = Callable[[int], None]
"""A function of a layer's index. The runner calls it on the engine thread after the layer's KV was written for the
whole batch; on a GPU, after the writes were enqueued."""


class StepOnItsWay(Protocol):
    """A submitted step. Invariant: its KV is written before that of a step submitted later."""

    def draw(self) -> None:
        """Samples what depends on the tokens of the step before. The engine calls it once, when it knows these and has
        submitted no later step; not where the runner's depth is 0."""

    def tokens(self) -> Run[SampledToken]:
        """Waits for the step. Returns `num_samples` tokens of each item, in the order of `batch.items`. Behind a guess
        that was wrong they mean nothing."""

    def scores(self) -> Run[TokenScores]:
        """One per item of `batch.scored`, once `tokens` has returned."""


class StepDone(Struct, frozen=True):
    """A step that has ended when `submit` returns."""

    sampled: Run[SampledToken]
    scored: Run[TokenScores] = ()

    def draw(self) -> None:
        pass

    def tokens(self) -> Run[SampledToken]:
        return self.sampled

    def scores(self) -> Run[TokenScores]:
        return self.scored


class Runner(Protocol):
    """Runs batches through a model, or pretends to (the mock engine's).

    A runner of depth 1 takes a step while the one before is still on its way. The token that a sequence waits for is
    then `PENDING` in its token ids, and only the runner knows it. A sequence with a draft waits for no
    token, and is `is_plain` where the depth is 1: the rows of its draft are sampled at once there, else one by one.
    """

    num_layers: int
    depth: int  # steps that may be on their way when another is submitted

    def submit(self, batch: Batch, layer_done: LayerDone | None) -> StepOnItsWay:
        """Starts the step. Writes KV into the slab, in each layer after the moves of its sequences' blocks."""
