"""Runs batches in plain torch: lays a batch out as flat tensors, calls the model, and samples."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence as Run

import torch
from torch import Tensor

from engine.model.attention import Caches, Span, StepAttention
from engine.model.families.llama import Llama
from engine.model.families.registry import MODELS
from engine.model.operations import Operations, TorchOperations
from engine.model.shard import vocabulary_share
from engine.model.weights import TensorSource
from engine.parallel.collective import Collective, own_shard
from engine.parallel.sharded_operations import ShardedOperations
from engine.runners.auto import dtype_name, is_auto, resolve_device
from engine.runners.cache_groups import in_two_groups
from engine.runners.draft_rows import sampled_in_turn
from engine.runners.prompt_scores import logits_in_parts, score, scored_rows
from engine.runners.sampler import Sampler
from engine.runners.step_shape import TorchStep
from engine.runners.torch_attention import TorchAttention, prepare, torch_attentions
from engine.sequences.batch import Batch, LayerDone, SampledToken, ScheduledSequence, StepDone
from engine.sequences.moves import Move
from kvtransfer.slab.layout import SlabLayout
from runtime.checkpoint.model_files import ModelFiles
from runtime.config.serving import EngineConfig, parse_bytes
from runtime.errors import ConfigError

_AUTO_KV_BYTES = 512 << 20  # on a CPU, which takes memory when it is first written


class ModelRunner:
    """Implements `engine.sequences.batch.Runner`, one step after the other. Owned by the engine thread.

    With ranks, the engine submits to rank 0's runner, which tells the other ranks' runners to `follow`.
    """

    depth = 0

    def __init__(
        self,
        model: Llama,
        attentions: Run[TorchAttention],
        caches: Caches,
        sampler: Sampler,
        collective: Collective | None = None,
    ) -> None:
        """attentions: of each layer."""
        self.tell: Callable[[TorchStep], object] | None = None  # called before a step runs here
        self.num_layers = model.config.num_layers
        self._model = model
        self._attentions = attentions
        self._caches = caches
        self._sampler = sampler
        self._collective = collective

    def close(self) -> None:
        """Nothing to close: no resource outlives a step."""

    @torch.inference_mode()
    def submit(self, batch: Batch, layer_done: LayerDone | None = None) -> StepDone:
        """Runs the batch to its end."""
        token_ids = itertools.chain.from_iterable(
            item.sequence.token_ids[item.start : item.end] for item in batch.items
        )
        step = TorchStep(
            list(token_ids), _spans(batch.chunks), _spans(batch.decode), _sample_rows(batch), scored_rows(batch)
        )
        if self.tell is not None:
            self.tell(step)
        hidden = self._run(step, layer_done)
        sampled: list[SampledToken] = []
        if step.sample_rows:
            logits = self._logits(hidden[self._tensor(step.sample_rows)])
            sampled = sampled_in_turn(
                batch.items, lambda rows, sequences: self._sampler.sample(logits[self._tensor(rows)], sequences)
            )
        return StepDone(sampled, [scores.landed() for scores in score(hidden, batch, self._logits)])

    @torch.inference_mode()
    def follow(self, step: TorchStep, layer_done: LayerDone | None, moves: Run[Move]) -> None:
        """Computes this rank's part of rank 0's step. moves: none, because copies on a CPU end before the step."""
        hidden = self._run(step, layer_done)
        if step.sample_rows:
            self._logits(hidden[self._tensor(step.sample_rows)])
        for _ in logits_in_parts(hidden, step.scored_rows, self._logits):
            pass

    def _run(self, step: TorchStep, layer_done: LayerDone | None) -> Tensor:
        """Hidden states [tokens, hidden]."""
        sinks = [layer.sinks for layer in self._model.layers]
        attend = StepAttention(
            layers=prepare(self._attentions, sinks, step.prefill, step.decode),
            caches=self._caches,
            num_prefill_tokens=len(step.token_ids) - len(step.decode),
            layer_done=layer_done,
        )
        return self._model.forward(self._tensor(step.token_ids), attend)

    def _logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab]"""
        logits = self._model.logits(hidden)
        if self._collective is None:
            return logits
        vocab_size = self._model.config.vocab_size
        return self._collective.gather_columns(logits, vocabulary_share(vocab_size, self._collective.size), vocab_size)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._caches[0].device)


def slab_layout(files: ModelFiles, config: EngineConfig, collective: Collective | None = None) -> SlabLayout:
    """The largest KV slab of this rank that fits into `engine.kv_memory`, without measuring memory. Raises ConfigError
    when it has no block."""
    model = own_shard(files.config, collective).config
    device = resolve_device(config)
    one_block = SlabLayout(
        num_layers=model.num_layers,
        num_blocks=1,
        num_kv_heads=model.num_kv_heads,
        block_size=config.block_size,
        head_dim=model.head_dim,
        dtype=config.stored_dtype(dtype_name(model.dtype, config, device)),
    )
    memory = _AUTO_KV_BYTES if is_auto(config.kv_memory) else parse_bytes(config.kv_memory, "engine.kv_memory")
    if memory < one_block.nbytes:
        problem = f"{config.kv_memory} is less than one KV block of {files.name}, {one_block.nbytes} bytes"
        raise ConfigError("engine.kv_memory", problem)
    one_group = dataclasses.replace(one_block, num_blocks=memory // one_block.nbytes)
    longest = config.max_model_len or files.max_position
    return in_two_groups(one_group, model, config.max_running, config.max_batch_tokens, longest)


def build_runner(
    files: ModelFiles,
    config: EngineConfig,
    caches: Caches,
    weights: TensorSource,
    collective: Collective | None = None,
) -> ModelRunner:
    """A runner on the caches' device, in the weights' dtype. Raises ModelError.

    `config.threads` above 0 sets torch's CPU threads for the whole process.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    cache = caches[0]
    num_blocks, num_kv_heads, _, block_size, head_dim = cache.shape
    shard = own_shard(files.config, collective)
    name = str(cache.dtype).removeprefix("torch.")
    layout = SlabLayout(files.config.num_layers, num_blocks, num_kv_heads, block_size, head_dim, name)
    operations: Operations = TorchOperations()
    if collective is not None:
        operations = ShardedOperations(operations, collective)
    model = MODELS[files.config.architecture](shard.config, weights, operations, shard.vocabulary)
    attentions = torch_attentions(files.config, layout, weights.dtype, cache.device)
    return ModelRunner(model, attentions, caches, Sampler(files.eos_token_ids), collective)


def _spans(items: Run[ScheduledSequence]) -> list[Span]:
    return [Span(item.start, item.end, item.sequence.block_table, item.sequence.window_table) for item in items]


def _sample_rows(batch: Batch) -> list[int]:
    """The rows of the last tokens of each sampled item."""
    ends = itertools.accumulate(item.num_tokens for item in batch.items)
    return [row for item, end in zip(batch.items, ends, strict=True) for row in range(end - item.num_samples, end)]
