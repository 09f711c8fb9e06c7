"""What `auto` means for device, dtype and attention, and whether a backend that was asked for can run here."""

import importlib.util
from importlib.util import find_spec
from typing import Literal

import torch

from runtime.checkpoint.model_config import ModelConfig
from runtime.config.serving import EngineConfig
from runtime.errors import ConfigError

TRITON_HEAD_DIMS = (16, 32, 64, 128)  # a kernel's tiles are powers of two


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


def flash_is_available(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda" or dtype == torch.float32 or torch.cuda.get_device_capability(device)[0] < 9:
        return False
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        return False
