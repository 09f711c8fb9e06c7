"""A model on its device, ready to run: weights, KV slab and runner. Workers load one at start."""

from dataclasses import dataclass

import torch

from baton.config import EngineConfig, parse_bytes
from engine.batch import Runner
from engine.model_files import ModelFiles
from engine.model_runner import build_runner, dtype_name, is_auto, resolve_attention, resolve_device, slab_layout
from engine.weights import Weights
from kvtransfer.memory_driver import memory_of
from kvtransfer.slab import Slab


@dataclass(frozen=True, slots=True)
class LoadedModel:
    runner: Runner
    slab: Slab


def load_model(files: ModelFiles, config: EngineConfig) -> LoadedModel:
    """As `config` says. Raises ConfigError or ModelError."""
    device = resolve_device(config)
    dtype = getattr(torch, dtype_name(files.config.dtype, config, device))
    attention = resolve_attention(config, files.config, device, dtype)
    if device.type == "cpu":
        host_slab = Slab(slab_layout(files, config))
        return LoadedModel(build_runner(files, config, host_slab.tensor), host_slab)
    if attention == "torch":
        device_slab = Slab(slab_layout(files, config), memory_of(device))
        return LoadedModel(build_runner(files, config, device_slab.tensor), device_slab)
    from engine.cuda_build import build_on_gpu  # here: Triton is installed only where there is a GPU

    gpu = build_on_gpu(
        files.config,
        Weights(files.folder, dtype, memory_of(device)),
        files.eos_token_ids,
        dtype=str(dtype).removeprefix("torch."),
        block_size=config.block_size,
        kv_bytes=None if is_auto(config.kv_memory) else parse_bytes(config.kv_memory, "engine.kv_memory"),
        gpu_share=config.gpu_share,
        max_batch_tokens=config.max_batch_tokens,
        max_running=config.max_running,
        max_model_len=min(files.max_position, config.max_model_len or files.max_position),
        flash=attention == "flash",
    )
    return LoadedModel(gpu.runner, gpu.slab)
