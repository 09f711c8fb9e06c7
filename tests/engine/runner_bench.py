"""Drives a ModelRunner with batches made by hand, as the scheduler would, without one."""

import itertools

import torch

from baton_proto.sampling import SamplingParams
from engine.model.weights import Weights
from engine.runners.torch_runner import build_runner
from engine.sequences.batch import Batch, SampledToken, ScheduledSequence
from engine.sequences.sequence import Sequence
from runtime.checkpoint.model_files import ModelFiles
from runtime.config.serving import EngineConfig

NUM_BLOCKS = 128
STALE = 3.0  # what unwritten slots of the slab hold


class RunnerBench:
    """All layers have the same blocks, also those with a window."""

    def __init__(self, files: ModelFiles, config: EngineConfig) -> None:
        model, self.block_size = files.config, config.block_size
        shape = (model.num_layers, NUM_BLOCKS, model.num_kv_heads, 2, config.block_size, model.head_dim)
        self.slab = torch.full(shape, STALE)
        self.runner = build_runner(files, config, self.slab, Weights(files.folder, self.slab.dtype))
        self._names = itertools.count()
        self._free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0)).tolist()

    def sequence(self, prompt: list[int], max_tokens: int, **sampling: object) -> Sequence:
        """A sequence that owns blocks, scattered over the slab, for its prompt and `max_tokens` more."""
        params = SamplingParams(max_tokens=max_tokens, **({"temperature": 0.0} | sampling))
        sequence = Sequence(f"r{next(self._names)}", list(prompt), len(prompt), params)
        sequence.block_table = [self._free.pop() for _ in range(-(-(len(prompt) + max_tokens) // self.block_size))]
        return sequence

    def step(self, prefill: list[tuple[Sequence, int]], decode: list[Sequence]) -> list[SampledToken]:
        """Runs chunks of so many tokens and one token of each of `decode`; appends what is sampled."""
        chunks = [self._scheduled(sequence, num_tokens) for sequence, num_tokens in prefill]
        batch = Batch(prefill=chunks, decode=[self._scheduled(sequence, 1) for sequence in decode])
        layers: list[int] = []
        result = list(self.runner.submit(batch, layers.append).tokens())
        assert layers == list(range(self.runner.num_layers))
        sampled = [item.sequence for item in batch.items if item.sample]
        for sequence, token in zip(sampled, result, strict=True):
            sequence.token_ids.append(token.token_id)
        for item in batch.items:
            item.sequence.num_computed_tokens = item.end
        return result

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The whole prompt at once, then token by token."""
        sequence = self.sequence(prompt, max_tokens)
        self.step([(sequence, len(prompt))], [])
        for _ in range(max_tokens - 1):
            self.step([], [sequence])
        return sequence.token_ids[len(prompt) :]

    def _scheduled(self, sequence: Sequence, num_tokens: int) -> ScheduledSequence:
        start = sequence.num_computed_tokens
        return ScheduledSequence(sequence, start, num_tokens, sample=start + num_tokens == len(sequence.token_ids))
