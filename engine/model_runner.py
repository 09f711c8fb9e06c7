"""Runs batches on one device: lays a batch out as flat tensors, calls the model, samples. Workers build one at start.

It alone decides what `auto` means for device, dtype and attention.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence as Run
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from baton.config import EngineConfig, parse_bytes
from baton.errors import ConfigError
from engine.attention import Span, StepAttention
from engine.batch import Batch, LayerDone, ScheduledSequence, StepDone
from engine.collective import Collective, own_shard
from engine.model_config import ModelConfig
from engine.model_files import ModelFiles
from engine.models.llama import Llama
from engine.models.registry import MODELS
from engine.operations import Operations, TorchOperations
from engine.rank_commands import TorchStep
from engine.rope import RotaryEmbedding
from engine.sampler import Sampler
from engine.shard import vocabulary_share
from engine.sharded_operations import ShardedOperations
from engine.torch_attention import TorchAttention
from engine.weights import TensorSource
from kvtransfer.layout import SlabLayout

TRITON_HEAD_DIMS = (16, 32, 64, 128)  # a kernel's tiles are powers of two
_AUTO_KV_BYTES = 512 << 20  # where nothing is measured: on a CPU it is taken when it is first used


class ModelRunner:
    """Implements `engine.batch.Runner` in plain torch, one step after the other. Owned by the engine thread.

    With ranks, rank 0's is submitted to and tells the others, which `follow`.
    """

    depth = 0

    def __init__(
        self,
        model: Llama,
        attention: TorchAttention,
        slab: Tensor,
        sampler: Sampler,
        collective: Collective | None = None,
    ) -> None:
        self.tell: Callable[[TorchStep], object] | None = None  # before a step runs here
        self.num_layers = model.config.num_layers
        self._model = model
        self._attention = attention
        self._slab = slab
        self._sampler = sampler
        self._collective = collective

    def close(self) -> None:
        """Nothing is held that outlives a step."""

    @torch.inference_mode()
    def submit(self, batch: Batch, layer_done: LayerDone | None = None) -> StepDone:
        """Runs the batch to its end."""
        token_ids = itertools.chain.from_iterable(
            item.sequence.token_ids[item.start : item.end] for item in batch.items
        )
        step = TorchStep(list(token_ids), _spans(batch.prefill), _spans(batch.decode), _sample_rows(batch))
        if self.tell is not None:
            self.tell(step)
        logits = self._run(step, layer_done)
        if logits is None:
            return StepDone([])
        return StepDone(self._sampler.sample(logits, [item.sequence for item in batch.items if item.sample]))

    @torch.inference_mode()
    def follow(self, step: TorchStep, layer_done: LayerDone | None) -> None:
        """Another rank's part of a step."""
        self._run(step, layer_done)

    def _run(self, step: TorchStep, layer_done: LayerDone | None) -> Tensor | None:
        """Logits of the rows that are sampled, if there are any."""
        attend = StepAttention(
            backend=self._attention,
            metadata=self._attention.prepare(step.prefill, step.decode),
            slab=self._slab,
            num_prefill_tokens=len(step.token_ids) - len(step.decode),
            layer_done=layer_done,
        )
        hidden = self._model.forward(self._tensor(step.token_ids), attend)
        if not step.sample_rows:
            return None
        logits = self._model.logits(hidden[self._tensor(step.sample_rows)])
        if self._collective is None:
            return logits
        vocab_size = self._model.config.vocab_size
        return self._collective.gather_columns(logits, vocabulary_share(vocab_size, self._collective.size), vocab_size)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._slab.device)


def slab_layout(files: ModelFiles, config: EngineConfig, collective: Collective | None = None) -> SlabLayout:
    """The KV slab of this rank that `engine.kv_memory` has room for, where memory is not measured. Raises ConfigError
    when that is not one block."""
    model = own_shard(files.config, collective).config
    device = resolve_device(config)
    one_block = SlabLayout(
        num_layers=model.num_layers,
        num_blocks=1,
        num_kv_heads=model.num_kv_heads,
        block_size=config.block_size,
        head_dim=model.head_dim,
        dtype=dtype_name(model.dtype, config, device),
    )
    memory = _AUTO_KV_BYTES if is_auto(config.kv_memory) else parse_bytes(config.kv_memory, "engine.kv_memory")
    if memory < one_block.nbytes:
        problem = f"{config.kv_memory} is less than one KV block of {files.name}, {one_block.nbytes} bytes"
        raise ConfigError("engine.kv_memory", problem)
    return dataclasses.replace(one_block, num_blocks=memory // one_block.nbytes)


def build_runner(
    files: ModelFiles,
    config: EngineConfig,
    slab: Tensor,
    weights: TensorSource,
    collective: Collective | None = None,
) -> ModelRunner:
    """On the slab's device, in the slab's dtype, for attention in plain torch. Raises ModelError.

    `config.threads` above 0 sets torch's CPU threads for the whole process.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    _, num_blocks, num_kv_heads, _, block_size, head_dim = slab.shape
    shard = own_shard(files.config, collective)
    name = str(slab.dtype).removeprefix("torch.")
    layout = SlabLayout(files.config.num_layers, num_blocks, num_kv_heads, block_size, head_dim, name)
    operations: Operations = TorchOperations()
    if collective is not None:
        operations = ShardedOperations(operations, collective)
    model = MODELS[files.config.architecture](shard.config, weights, operations, shard.vocabulary)
    backend = TorchAttention(layout, RotaryEmbedding(files.config, slab.device), slab.dtype, slab.device)
    return ModelRunner(model, backend, slab, Sampler(files.eos_token_ids), collective)


def resolve_attention(
    config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> Literal["torch", "triton", "flash"]:
    """What `auto` means here. Raises ConfigError when the backend that was asked for cannot run."""
    has_triton = device.type == "cuda" and find_spec("triton") is not None and model.head_dim in TRITON_HEAD_DIMS
    has_flash = has_triton and find_spec("flash_attn") is not None and dtype != torch.float32
    if config.attention == "auto":
        return "flash" if has_flash else "triton" if has_triton else "torch"
    if (config.attention == "triton" and not has_triton) or (config.attention == "flash" and not has_flash):
        problem = f"{config.attention!r} is not available on {device.type} for {dtype} and heads of {model.head_dim}"
        raise ConfigError("engine.attention", problem)
    return config.attention


def resolve_device(config: EngineConfig) -> torch.device:
    """Raises ConfigError when the device is not there."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError("engine.device", "cuda is not available here")
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


def is_auto(kv_memory: str) -> bool:
    return kv_memory.strip() == "auto"


def dtype_name(published: str, config: EngineConfig, device: torch.device) -> str:
    if config.dtype != "auto":
        return config.dtype
    return "float32" if device.type == "cpu" else published


def _spans(items: Run[ScheduledSequence]) -> list[Span]:
    return [Span(item.start, item.end, item.sequence.block_table) for item in items]


def _sample_rows(batch: Batch) -> list[int]:
    """Rows of the last token of each item that is sampled."""
    ends = itertools.accumulate(item.num_tokens for item in batch.items)
    return [end - 1 for item, end in zip(batch.items, ends, strict=True) if item.sample]
