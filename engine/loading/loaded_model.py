"""A model on its device, ready to run: weights, KV slab and runner."""

from collections.abc import Callable, Sequence as Run
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.loading.model_memory import ModelMemory
from engine.model.random_weights import RandomWeights
from engine.model.weights import TensorSource, Weights
from engine.parallel.collective import Collective, own_shard
from engine.runners.auto import dtype_name, is_auto, keeps_fp8, resolve_attention, resolve_device
from engine.runners.torch_runner import build_runner, slab_layout
from engine.sequences.batch import LayerDone, Runner
from engine.sequences.moves import Move
from kvtransfer.prefill_side.sender import Sender
from kvtransfer.prefill_side.sending import KvSender
from kvtransfer.slab.adopted_slab import AdoptedSlab
from kvtransfer.slab.slab import Slab
from kvtransfer.wire.identity import SlabIdentity
from runtime.checkpoint.model_files import ModelFiles
from runtime.config.serving import EngineConfig, TransferConfig, parse_bytes
from runtime.device.drivers import memory_of
from runtime.security.cluster_key import ClusterKey


class RankRunner(Runner, Protocol):
    """A runner of the only rank, or of one of several: see engine/ranks/tensor_parallel.py."""

    tell: Callable[[Any], object] | None  # on rank 0 of several: called with each step, or part of it, before it begins

    def follow(self, step: Any, layer_done: LayerDone | None, moves: Run[Move]) -> None:
        """Takes part in a step that rank 0 has told, in each layer after the moves; called on the other ranks."""

    def close(self) -> None:
        """Releases what steps hold; there is no step after it."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    runner: RankRunner
    slab: Slab
    memory: ModelMemory
    dtype: torch.dtype  # that the model computes in
    collective: Collective | None = None  # of several ranks

    def sender(self, identity: SlabIdentity, config: TransferConfig, key: ClusterKey | None) -> KvSender:
        """The KV sender of a prefill worker; the caller closes it."""
        return Sender(self.slab, identity, config, key)

    def other_slabs(self) -> list[AdoptedSlab]:
        """The other ranks' slabs, for a decode worker; the caller closes them."""
        return []

    def receive(self, name: str, shape: tuple[int, ...]) -> None:
        """Another rank than 0: takes part in rank 0's broadcast of a whole tensor, and keeps its part."""
        assert self.collective is not None
        whole = torch.empty(shape, dtype=self.dtype, device=self.slab.flat.device)
        self.collective.broadcast(whole.view(torch.uint8))
        self.memory.replace(name, whole)

    def close(self) -> None:
        self.runner.close()
        self.slab.close()


def load_model(
    files: ModelFiles,
    config: EngineConfig,
    collective: Collective | None = None,
    *,
    random_weights: bool = False,
) -> LoadedModel:
    """Loads the model as configured; with `collective`, this rank's part of it. Raises ConfigError or ModelError.

    random_weights: for measurements on a GPU; the folder of `files` is not read.
    """
    device = resolve_device(config)
    dtype = getattr(torch, dtype_name(files.config.dtype, config, device))
    attention = resolve_attention(config, files.config, device, dtype)
    shard = own_shard(files.config, collective)
    driver = memory_of(device)
    fp8, kept = config.dtype == "fp8", keeps_fp8(config, attention, device)
    weights: TensorSource
    if random_weights:
        weights = RandomWeights(shard, dtype, driver, fp8=kept)
    else:
        weights = Weights(files.folder, dtype, None if device.type == "cpu" else driver, shard, fp8=fp8, keeps_fp8=kept)
        if shard.rank == 0:
            weights.start_hashing()
    if attention == "torch":
        slab = Slab(slab_layout(files, config, collective), driver)
        runner = build_runner(files, config, slab.layers, weights, collective)
        return LoadedModel(runner, slab, ModelMemory(weights, slab), dtype, collective)
    from engine.cuda.cuda_build import build_on_gpu  # here: Triton is installed only where there is a GPU

    gpu = build_on_gpu(
        files.config,
        weights,
        files.eos_token_ids,
        kv_dtype=config.stored_dtype(str(dtype).removeprefix("torch.")),
        block_size=config.block_size,
        kv_bytes=None if is_auto(config.kv_memory) else parse_bytes(config.kv_memory, "engine.kv_memory"),
        gpu_share=config.gpu_share,
        memory_share=config.gpu_memory_share,
        max_batch_tokens=config.max_batch_tokens,
        max_running=config.max_running,
        max_model_len=min(files.max_position, config.max_model_len or files.max_position),
        flash=attention == "flash",
        collective=collective,
    )
    memory = ModelMemory(weights, gpu.slab)
    return LoadedModel(gpu.runner, gpu.slab, memory, dtype, collective)
