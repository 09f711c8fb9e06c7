"""The meaning of `auto` for device, dtype and attention, and whether the backend that was asked for can run here."""

from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Literal

import torch

from runtime.checkpoint.families import FAMILIES
from runtime.checkpoint.model_config import ModelConfig, served_dtype
from runtime.config.serving import EngineConfig
from runtime.errors import ConfigError

_TRITON_HEAD_DIMS = range(16, 257)  # from the least that tl.dot takes to the most that was tried
_FLASH_HEAD_DIMS = (16, 32, 64, 128)  # others were not tried
_FP8_FROM = (8, 9)  # compute capability


def resolve_attention(
    config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> Literal["torch", "triton", "flash"]:
    """The backend that runs; `auto` takes the fastest. Raises ConfigError when the one asked for cannot run, or the
    device has no KV in 8 bits."""
    if config.kv_dtype == "fp8" and not _has_fp8(device):
        raise ConfigError("engine.kv_dtype", "'fp8' needs a GPU of compute capability 8.9 (Ada, Hopper) or a CPU: auto")
    is_rotated_whole = model.rope.dim == model.head_dim or not FAMILIES[model.architecture].has_head_norms
    fits = model.head_dim in _TRITON_HEAD_DIMS and is_rotated_whole
    has_triton = device.type == "cuda" and find_spec("triton") is not None and fits
    is_plain = model.has_plain_scores and model.head_dim in _FLASH_HEAD_DIMS
    has_flash = has_triton and is_plain and config.kv_dtype == "auto" and flash_is_available(device, dtype)
    if config.attention == "auto":
        return "flash" if has_flash else "triton" if has_triton else "torch"
    if (config.attention == "triton" and not has_triton) or (config.attention == "flash" and not has_flash):
        scores = "" if model.has_plain_scores else ", with windows, soft caps or sinks"
        heads = f"heads of {model.head_dim}{scores}" + (", with KV in 8 bits" if config.kv_dtype == "fp8" else "")
        problem = f"{config.attention!r} is not available on {device.type} for {dtype} and {heads}"
        raise ConfigError("engine.attention", problem)
    return config.attention


def flash_is_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether flash-attn-4 (`flash_attn.cute`) is installed and runs here, on Hopper or newer.

    Because flash-attn 2 has a package of the same name, whose import loads CUDA code, nothing is imported.
    """
    if device.type != "cuda" or dtype == torch.float32 or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    package = find_spec("flash_attn")
    folders = None if package is None else package.submodule_search_locations
    return bool(folders) and PathFinder.find_spec("flash_attn.cute", folders) is not None


def resolve_device(config: EngineConfig) -> torch.device:
    """Raises ConfigError when the device does not exist."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError("engine.device", "cuda is not available here")
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


def is_auto(kv_memory: str) -> bool:
    return kv_memory.strip() == "auto"


def dtype_name(published: str, config: EngineConfig, device: torch.device) -> str:
    """The dtype of weights and KV. published: the checkpoint's."""
    return served_dtype(published, config.dtype, on_gpu=device.type != "cpu")


def keeps_fp8(config: EngineConfig, attention: str, device: torch.device) -> bool:
    """Whether weights lie in memory as 8-bit numbers, which the Triton operations multiply on Ada, Hopper and newer;
    elsewhere as the values of such numbers."""
    return config.dtype == "fp8" and attention != "torch" and device.type == "cuda" and _has_fp8(device)


def _has_fp8(device: torch.device) -> bool:
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= _FP8_FROM
