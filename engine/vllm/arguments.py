"""What serving.yaml says, as arguments of vLLM's engine: the section `engine`, and the section `vllm` as it stands."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from runtime.checkpoint.served_model import is_mock
from runtime.config.serving import EngineConfig, ServingConfig, parse_bytes
from runtime.errors import ConfigError, nearest

CPU_KV_MEMORY = "512MiB"  # as our own engine's
ADAPTER_FILE = "adapter_config.json"
LORA_PLACES = 4  # adapters in one batch, where `vllm: {max_loras: N}` says nothing else: each takes memory
POOLING = "pooling"  # vLLM's runner that embeds
CPU_EXTENSION = "engine.vllm.rewinding.cpu_extension.CpuExtension"

OWNED = {
    "model": "model",
    "tokenizer": "model",
    "served_model_name": "served_model_name",
    "block_size": "engine.block_size",
    "dtype": "engine.dtype",
    "kv_cache_memory_bytes": "engine.kv_memory",
    "max_model_len": "engine.max_model_len",
    "max_num_batched_tokens": "engine.max_batch_tokens",
    "max_num_seqs": "engine.max_running",
    "tensor_parallel_size": "engine.tensor_parallel",
    "gpu_memory_utilization": "engine.gpu_memory_share",
    "data_parallel_size": "workers.decode",
    "enable_prefix_caching": "",
    "kv_events_config": "",
    "kv_transfer_config": "",
    "disable_log_stats": "",
    "skip_tokenizer_init": "",
    "enable_logging_iteration_details": "",
    "worker_extension_cls": "",
}
"""Arguments of vLLM that Baton decides, by the key that says how; "": nobody else may."""

OURS_ALONE = (
    "attention",
    "host_kv_memory",
    "disk_kv",
    "speculation",
    "prefill_tensor_parallel",
)
"""Keys of the section `engine` that vLLM has nothing for. In a mixed service they are our own engine's."""


def check_vllm(config: ServingConfig) -> None:
    """Raises ConfigError for what vLLM's workers cannot do, and for what another key decides. What only vLLM knows is
    checked by vllm_arguments()."""
    if is_mock(config):
        raise ConfigError("workers.engine", "the mock model is our own engine's: baton, or another model")
    mixed = config.uses("baton")
    for name in OURS_ALONE:
        if not mixed and getattr(config.engine, name) != getattr(EngineConfig(), name):
            raise ConfigError(f"engine.{name}", "vLLM has no such thing: leave it out, or set workers.engine: baton")
    if config.workers.per_process not in (None, 1):
        raise ConfigError("workers.per_process", "each worker with vLLM has a process of its own: leave it out")
    for key, theirs in (("dtype", "quantization"), ("kv_dtype", "kv_cache_dtype")):
        if getattr(config.engine, key) == "fp8":
            raise ConfigError(f"engine.{key}", f"fp8 is for Baton's own engine; vLLM takes `vllm: {{{theirs}: fp8}}`")
    for name, key in OWNED.items():
        if name in config.vllm:
            other = f"set {key} instead" if key else "Baton sets it; leave it out"
            raise ConfigError(f"vllm.{name}", other)
    for name, folder in config.adapters.items() if config.computes else ():
        if not (Path(folder).expanduser() / ADAPTER_FILE).is_file():
            raise ConfigError(f"adapters.{name}", f"{folder} has no {ADAPTER_FILE}: name the folder of a LoRA adapter")
    _check_sharing(config)


def shares_kv(config: ServingConfig) -> bool:
    """Whether prompts may run on other workers than the answers."""
    return config.may_have("prefill") and "vllm" in config.workers.by_engine("prefill")


def _check_sharing(config: ServingConfig) -> None:
    """Raises ConfigError where workers with vLLM cannot send each other KV."""
    if shares_kv(config) and config.engine.tensor_parallel > 1:
        key = "workers.prefill" if config.workers.count("prefill") else "planner.limits.max_prefill"
        raise ConfigError(key, "vLLM's workers of several ranks run their prompts themselves: set it to 0")
    if shares_kv(config) and config.vllm.get("async_scheduling"):
        problem = "a step that is scheduled early may take the blocks of a prompt that is being sent: leave it out"
        raise ConfigError("vllm.async_scheduling", problem)


def vllm_arguments(
    config: ServingConfig, folder: Path, events: dict[str, Any], known: Collection[str], *, on_cpu: bool
) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs, which are `known`. `folder`: the model's. `events`: a KVEventsConfig's
    fields. Raises ConfigError."""
    for name in config.vllm:
        if name not in known:
            near = nearest(name, known, "one")
            raise ConfigError(f"vllm.{name}", f"this vLLM has no such engine argument{near}")
    engine = config.engine
    arguments: dict[str, Any] = {
        "model": str(folder),
        "served_model_name": config.served_model_name or config.model,
        "block_size": engine.block_size,
        "dtype": "float32" if on_cpu and engine.dtype == "auto" else engine.dtype,
        "max_model_len": engine.max_model_len,
        "max_num_batched_tokens": engine.max_batch_tokens,
        "max_num_seqs": engine.max_running,
        "tensor_parallel_size": engine.tensor_parallel,
        "enforce_eager": on_cpu,
        "enable_prefix_caching": None if config.vllm.get("runner") == POOLING else True,  # vLLM knows if it may
        "kv_events_config": events,
        "scheduling_policy": "priority",
        "generation_config": "vllm",  # the router applies the model's own
        # The library that the router checks grammars with. Without white space between the parts of JSON, because its
        # version in vLLM's environment sets no bound to it, and a model may write nothing else.
        "structured_outputs_config": {"backend": "guidance", "disable_any_whitespace": True},
        "enable_logging_iteration_details": True,  # how long a step took, and what it computed
    }
    memory = engine.kv_memory.strip()
    if memory != "auto" or on_cpu:
        arguments["kv_cache_memory_bytes"] = parse_bytes(
            CPU_KV_MEMORY if memory == "auto" else memory, "engine.kv_memory"
        )
    if config.adapters:
        # On a CPU vLLM 0.32 lets the adapter in the last place work on requests that name none: that place stays empty.
        places = len(config.adapters) + 1 if on_cpu else min(len(config.adapters), LORA_PLACES)
        arguments |= {"enable_lora": True, "max_loras": places}
    if shares_kv(config):
        arguments["async_scheduling"] = False
    if on_cpu:
        arguments["worker_extension_cls"] = CPU_EXTENSION
    else:
        arguments["gpu_memory_utilization"] = engine.gpu_memory_share / engine.gpu_share
    return {name: value for name, value in arguments.items() if name in known} | config.vllm
