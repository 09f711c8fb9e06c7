"""What suits the machine, for what the configuration leaves open. On CPUs the schema's own defaults hold.

The figures are in benchmarks/README.md: blocks of 64 tokens in kernel_speed, and in mixed_load the largest budgets of a
step that keep the inter-token latency below three times that of a quiet worker.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from runtime.checkpoint.model_config import served_dtype
from runtime.checkpoint.model_files import ModelFiles
from runtime.config.serving import AUTO_KEYS, ServingConfig, for_prefill_worker

SMALL_HIDDEN_SIZE = 2048  # up to about 2B parameters
PREFILL_TOKENS = 8192  # of one step, as vLLM takes on large GPUs
ALONE: Final = {"workers": {"prefill": 0, "decode": 1}}
"""What serving.yaml says of an engine in a program, which shares the machine's cores and memory with no worker."""


def suited(config: ServingConfig, given: Mapping[str, Any], files: ModelFiles, *, gpu: bool) -> ServingConfig:
    """`given`: what the user wrote, as plain data; these keys stay, unless they say `auto`."""
    if not gpu:
        return config
    wrote = {key for key, value in given.get("engine", {}).items() if value != "auto"}
    batch_tokens = 1024 if files.config.hidden_size <= SMALL_HIDDEN_SIZE else 512
    longest = min(files.max_position, config.engine.max_model_len or files.max_position)
    chosen: dict[str, int | None] = {
        "block_size": 64,
        "max_batch_tokens": batch_tokens,
        "prefill_batch_tokens": max(config.engine.max_batch_tokens, batch_tokens, min(PREFILL_TOKENS, longest)),
        "max_running": 256,
    }
    assert chosen.keys() == set(AUTO_KEYS)
    if not config.uses("baton"):
        chosen |= {"max_batch_tokens": PREFILL_TOKENS, "prefill_batch_tokens": None}  # its decodes wait for no prompt
    open_keys = {key: value for key, value in chosen.items() if key not in wrote}
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, **open_keys))


def suited_alone(config: ServingConfig, given: Mapping[str, Any], files: ModelFiles, *, gpu: bool) -> ServingConfig:
    """Does what `suited` does for an engine in a program: its steps are as long as a prefill worker's, unless the user
    wrote how long, because nobody waits for the next token."""
    config = suited(config, given, files, gpu=gpu)
    if given.get("engine", {}).get("max_batch_tokens", "auto") != "auto":
        return config
    tokens = config.engine.prefill_batch_tokens or config.engine.max_batch_tokens
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, max_batch_tokens=tokens))


def described(config: ServingConfig, files: ModelFiles, *, gpu: bool) -> dict[str, Any]:
    """What workers take, by key."""
    engine = config.engine
    return {
        "device": "cuda" if gpu else "cpu",
        "dtype": served_dtype(files.config.dtype, engine.dtype, on_gpu=gpu),
        "block_size": engine.block_size,
        "max_batch_tokens": engine.max_batch_tokens,
        "prefill_batch_tokens": for_prefill_worker(config).engine.max_batch_tokens,
        "max_running": engine.max_running,
    }
