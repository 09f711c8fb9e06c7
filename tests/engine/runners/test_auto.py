"""What `attention: auto` means: with a fake flash_attn on disk and a fake GPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.runners.auto import flash_is_available, resolve_attention
from runtime.checkpoint.model_config import ModelConfig
from runtime.checkpoint.model_files import resolve_model
from runtime.config.serving import EngineConfig
from runtime.errors import ConfigError
from tests.tiny_model import write_tiny_model

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
HOPPER, AMPERE = (9, 0), (8, 6)


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    return resolve_model(str(write_tiny_model(tmp_path / "model"))).config


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, version: int | None, capability: tuple[int, int]) -> None:
    """`version` of flash-attn; None: there is none. Importing it fails, so nobody may."""
    package = folder / "flash_attn"
    package.mkdir(parents=True)
    if version is not None:
        (package / "__init__.py").write_text("raise ImportError('an extension for another torch')")
    if version == 4:
        (package / "cute").mkdir()
        (package / "cute" / "__init__.py").touch()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.mark.parametrize(
    ("version", "capability", "backend"),
    [
        (4, HOPPER, "flash"),
        (4, (10, 0), "flash"),
        (4, AMPERE, "triton"),
        (2, HOPPER, "triton"),
        (2, AMPERE, "triton"),
        (None, HOPPER, "triton"),
    ],
)
def test_auto_takes_flash_attn_4_on_hopper_and_newer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: ModelConfig,
    version: int | None,
    capability: tuple[int, int],
    backend: str,
) -> None:
    install(tmp_path / "site", monkeypatch, version, capability)
    assert resolve_attention(EngineConfig(), model, CUDA, torch.bfloat16) == backend
    assert flash_is_available(CUDA, torch.bfloat16) == (backend == "flash")
    if backend != "flash":
        with pytest.raises(ConfigError, match="'flash' is not available on cuda"):
            resolve_attention(EngineConfig(attention="flash"), model, CUDA, torch.bfloat16)


def test_flash_takes_neither_float32_nor_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: ModelConfig
) -> None:
    install(tmp_path / "site", monkeypatch, 4, HOPPER)
    assert resolve_attention(EngineConfig(), model, CUDA, torch.float32) == "triton"
    assert resolve_attention(EngineConfig(), model, CPU, torch.bfloat16) == "torch"
    assert resolve_attention(EngineConfig(attention="torch"), model, CUDA, torch.bfloat16) == "torch"
    with pytest.raises(ConfigError, match="'triton' is not available on cpu"):
        resolve_attention(EngineConfig(attention="triton"), model, CPU, torch.bfloat16)


def test_kv_in_8_bits_is_for_triton_and_for_gpus_that_have_such_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: ModelConfig
) -> None:
    install(tmp_path / "site", monkeypatch, 4, HOPPER)
    assert resolve_attention(EngineConfig(kv_dtype="fp8"), model, CUDA, torch.bfloat16) == "triton"
    assert resolve_attention(EngineConfig(kv_dtype="fp8"), model, CPU, torch.float32) == "torch"
    with pytest.raises(ConfigError, match=r"engine\.attention: 'flash' is not .*, with KV in 8 bits"):
        resolve_attention(EngineConfig(kv_dtype="fp8", attention="flash"), model, CUDA, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: AMPERE)
    with pytest.raises(ConfigError, match=r"engine\.kv_dtype: 'fp8' needs a GPU of compute capability 8\.9"):
        resolve_attention(EngineConfig(kv_dtype="fp8"), model, CUDA, torch.bfloat16)


def test_windows_soft_caps_sinks_and_other_sizes_are_for_triton_and_very_wide_heads_for_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: ModelConfig
) -> None:
    install(tmp_path / "site", monkeypatch, 4, HOPPER)
    windows = replace(model, windows=(24,) * model.num_layers)
    with pytest.raises(ConfigError, match=r"'flash' is not available on cuda .*, with windows, soft caps or sinks"):
        resolve_attention(EngineConfig(attention="flash"), windows, CUDA, torch.bfloat16)
    rows = {
        "triton": [
            windows,
            replace(model, attention_softcap=50.0),
            replace(model, architecture="gpt-oss"),
            *(replace(model, head_dim=size) for size in (80, 96, 192, 256)),
        ],
        "torch": [replace(model, head_dim=320)],
        "flash": [replace(model, num_experts=8, experts_per_token=2, expert_size=32)],
    }
    for backend, models in rows.items():
        for one in models:
            assert resolve_attention(EngineConfig(), one, CUDA, torch.bfloat16) == backend
