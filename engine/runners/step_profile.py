"""Runs prompts and batches of many sizes on an engine and yields the time of each step, measured as in a live worker.

Invariant: the engine is idle before and after. Sequences that decode are admitted as from a prefill worker, so that no
prompt has to be computed first; the content of their KV blocks does not change the time.
"""

import itertools
import random
from collections.abc import Iterator

from baton_proto.discovery import TimedStep
from baton_proto.sampling import SamplingParams
from engine.core.engine import Engine
from engine.sequences.sequence import Sequence
from runtime.errors import ModelError

PROMPT_TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT_TOKENS = (32, 256, 1024, 4096)
REPEATS = 4  # of a prompt
STEPS = 8  # of a batch that decodes
WARM = 2  # steps of a new kind that compile, allocate and fill caches; of prompts the first one of each length


class StepProfile:
    """`max_tokens` of prompt and output together; `limit_s`: the time, by the engine's clock, that prompts and batches
    each may take, about."""

    def __init__(self, engine: Engine, vocab_size: int, max_tokens: int, limit_s: float) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._limit_s = limit_s
        self._dice = random.Random(0)
        self._serial = itertools.count()

    def prompts(self) -> Iterator[TimedStep]:
        """The shortest first. Raises ModelError when a step fails."""
        began_s = self._engine.clock()
        for num_tokens, repeat in itertools.product(PROMPT_TOKENS, range(REPEATS)):
            if num_tokens >= self._max_tokens or self._engine.clock() - began_s > self._limit_s:
                return
            self._engine.add(self._sequence(num_tokens, prefill_only=True))
            steps = list(self._steps())
            if repeat:
                yield from steps

    def batches(self) -> Iterator[TimedStep]:
        """The shortest contexts first; those that do not fit into the memory are left out. Raises ModelError."""
        began_s = self._engine.clock()
        for context_tokens, count in itertools.product(CONTEXT_TOKENS, SEQUENCES):
            if self._engine.clock() - began_s > self._limit_s:
                return
            if context_tokens + STEPS < self._max_tokens and count <= self._engine.scheduler.max_running:
                yield from self._batch(context_tokens, count)

    def _batch(self, context_tokens: int, count: int) -> Iterator[TimedStep]:
        sequences = [self._sequence(context_tokens) for _ in range(count)]
        reserved = [sequence for sequence in sequences if self._engine.reserve(sequence)]
        if len(reserved) < count:
            for sequence in reserved:
                self._engine.release(sequence)
            return
        for sequence in sequences:
            self._engine.admit(sequence, sequence.token_ids[-1], None)
        steps = [step for step in self._steps() if step.sequences == count]
        yield from steps[WARM:]

    def _sequence(self, num_tokens: int, prefill_only: bool = False) -> Sequence:
        token_ids = self._dice.choices(range(self._vocab_size), k=num_tokens)
        sampling = SamplingParams(max_tokens=1 if prefill_only else STEPS, temperature=0.0, ignore_eos=True)
        return Sequence(f"profile-{next(self._serial)}", token_ids, num_tokens, sampling, prefill_only=prefill_only)

    def _steps(self) -> Iterator[TimedStep]:
        """Runs steps until nothing is left to do, and forgets all prefixes."""
        self._engine.timed_steps.take()
        while self._engine.has_work:
            failed = [output.error for output in self._engine.step().outputs if output.finish == "error"]
            if failed:
                raise ModelError("profile", failed[0] or "an engine step failed")
            yield from self._engine.timed_steps.take()
        self._engine.clear_cache()
        self._engine.block_manager.cache.take_events()
