"""What suits the machine, for what the configuration leaves open. On CPUs the schema's own defaults hold.

The figures are in benchmarks/README.md: blocks of 64 tokens in kernel_speed.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from runtime.checkpoint.model_config import served_dtype
from runtime.checkpoint.model_files import ModelFiles
from runtime.config.serving import AUTO_KEYS, EngineConfig, ServingConfig

ALONE: Final = {"workers": {"prefill": 0, "decode": 1}, "planner": {"targets": {"itl_ms": 1000.0}}}
"""What serving.yaml says of an engine in a program, which shares the machine's cores and memory with no worker. Its
steps are long, because nobody waits for the next token."""


def suited(config: ServingConfig, given: Mapping[str, Any], files: ModelFiles, *, gpu: bool) -> ServingConfig:
    """`given`: what the user wrote, as plain data; these keys stay, unless they say `auto`."""
    if not gpu:
        return config
    wrote = {key for key, value in given.get("engine", {}).items() if value != "auto"}
    longest = min(files.max_position, config.engine.max_model_len or files.max_position)
    chosen = {"block_size": 64, "max_batch_tokens": min(EngineConfig().max_batch_tokens, longest), "max_running": 256}
    assert chosen.keys() == set(AUTO_KEYS)
    open_keys = {key: value for key, value in chosen.items() if key not in wrote}
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, **open_keys))


def described(config: ServingConfig, files: ModelFiles, *, gpu: bool) -> dict[str, Any]:
    """What workers take, by key."""
    engine = config.engine
    return {
        "device": "cuda" if gpu else "cpu",
        "dtype": "fp8" if engine.dtype == "fp8" else served_dtype(files.config.dtype, engine.dtype, on_gpu=gpu),
        "block_size": engine.block_size,
        "max_batch_tokens": engine.max_batch_tokens,
        "max_running": engine.max_running,
    }
