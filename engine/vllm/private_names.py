"""Every name of vLLM that workers with vLLM use, with what it is for, and which of them a version lacks.

vLLM promises few of these names: a new version may drop or move any other. A name that a worker cannot do without is
told at its start, instead of at the first request; what only a feature needs switches that feature off.
"""

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import structlog

from runtime.errors import ConfigError

EVERYTHING: Final = ""
SHARING: Final = "prompts on workers of their own (workers.prefill)"
SLEEP: Final = "baton sleep"
SEEDS: Final = "seeded prompts of several steps on CPUs"
STEP_TIMES: Final = "the expected length of steps"
IMAGES: Final = "images in prompts"
CACHED: Final = "cached tokens in usage"
ADAPTERS: Final = "adapters"
EMBEDDINGS: Final = "embeddings and scores"
OLDER: Final = "what older versions are asked for in another way"

ARGUMENTS: Final = {"worker_extension_cls": SEEDS, "enable_logging_iteration_details": STEP_TIMES}
"""Arguments of vLLM's engine that go with a feature."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Name:
    """`path`: MODULE:NAME, MODULE:CLASS.NAME of a method or a field, or MODULE:CLASS.METHOD.NAME of an argument."""

    path: str
    use: str
    feature: str = EVERYTHING  # that is off without it


CLIENT: Final = "vllm.v1.engine.core_client:AsyncMPClient"
CONNECTOR: Final = "vllm.distributed.kv_transfer.kv_connector.v1.base"
STATS: Final = "vllm.v1.metrics.stats"
DETAILS: Final = "vllm.v1.metrics.stats:SchedulerIterationDetails"
CONFIG: Final = "vllm.config"
TRANSFER: Final = "vllm.config:KVTransferConfig"
STEP: Final = "vllm.v1.core.sched.output"
CACHE: Final = "vllm.v1.kv_cache_interface"


def _of(owner: str, names: str, use: str, feature: str = EVERYTHING) -> tuple[Name, ...]:
    between = "." if ":" in owner else ":"
    return tuple(Name(f"{owner}{between}{name}", use, feature) for name in names.split())


NAMES: Final = (
    *_of("vllm", "__version__", "what is served"),
    *_of("vllm", "SamplingParams", "a request"),
    *_of("vllm.inputs:TokensPrompt", "prompt_token_ids cache_salt", "a request's prompt"),
    *_of("vllm", "PoolingParams", "a request for an embedding or a score", EMBEDDINGS),
    *_of("vllm.v1.engine.async_llm:AsyncLLM", "get_supported_tasks", "what the model does", EMBEDDINGS),
    *_of(f"{CONFIG}:ModelConfig", "pooler_config embedding_size", "what the model does", EMBEDDINGS),
    *_of(f"{CONFIG}:ModelConfig", "convert_type architectures", "whether it embeds or scores", EMBEDDINGS),
    *_of("vllm.sampling_params", "StructuredOutputsParams", "a request's grammar"),
    *_of("vllm.sampling_params", "RepetitionDetectionParams", "when an answer ends that repeats itself"),
    *_of(CONFIG, "KVEventsConfig", "KV events"),
    *_of(f"{CONFIG}:KVEventsConfig", "enable_kv_cache_events publisher endpoint replay_endpoint", "KV events"),
    *_of(CONFIG, "StructuredOutputsConfig", "the library of grammars"),
    *_of(f"{CONFIG}:StructuredOutputsConfig", "backend disable_any_whitespace", "the library of grammars"),
    *_of(f"{CONFIG}:VllmConfig", "cache_config model_config", "a worker's size"),
    *_of(f"{CONFIG}:CacheConfig", "block_size num_gpu_blocks", "a worker's size"),
    *_of(f"{CONFIG}:ModelConfig", "dtype max_model_len", "a worker's size"),
    *_of(f"{CONFIG}:ModelConfig", "enable_sleep_mode", "whether it sleeps", SLEEP),
    *_of("vllm.platforms:current_platform", "is_cpu is_cuda", "CPU or GPU"),
    *_of("vllm.engine.arg_utils", "AsyncEngineArgs", "the start's arguments"),
    *_of("vllm.v1.engine.async_llm:AsyncLLM", "from_engine_args shutdown", "start and end"),
    *_of("vllm.v1.engine.async_llm:AsyncLLM", "engine_core input_processor vllm_config", "the parts that we talk to"),
    *_of("vllm.v1.engine.async_llm:AsyncLLM", "output_handler", "is ended, because we take the outputs"),
    *_of("vllm.v1.engine.input_processor:InputProcessor", "process_inputs", "the checks of a request"),
    *_of("vllm.v1.engine.input_processor:InputProcessor.process_inputs", "priority lora_request", "the same"),
    *_of("vllm.v1.engine.input_processor:InputProcessor", "renderer", "who makes prompts with images", IMAGES),
    *_of("vllm.renderers:BaseRenderer.render_cmpl_async", "skip_mm_cache", "a prompt with images", IMAGES),
    *_of("vllm.multimodal.media:MediaConnector", "fetch_image_async", "a picture of its bytes", IMAGES),
    *_of("vllm.inputs:TokensPrompt", "multi_modal_data multi_modal_uuids", "pictures and their names", IMAGES),
    *_of(f"{CONFIG}:ModelConfig", "is_multimodal_model multimodal_config", "whether it takes images", IMAGES),
    *_of(f"{CONFIG}:MultiModalConfig", "media_io_kwargs", "how pictures are read", IMAGES),
    *_of(f"{CLIENT}", "add_request_async abort_requests_async", "requests go past AsyncLLM's queues"),
    *_of(f"{CLIENT}", "get_output_async", "the news of a step stay together"),
    *_of(f"{CLIENT}", "sleep_async wake_up_async", "memory is given back and taken again", SLEEP),
    *_of(f"{CLIENT}", "reset_prefix_cache_async", "a cache that sleeps is empty", SLEEP),
    *_of(f"{CLIENT}", "collective_rpc_async", "weights are read again", SLEEP),
    *_of(f"{CLIENT}", "add_lora_async", "an adapter is checked and loaded", ADAPTERS),
    *_of("vllm.lora.request:LoRARequest", "lora_name lora_int_id lora_path", "an adapter", ADAPTERS),
    *_of(f"{CONFIG}:VllmConfig", "lora_config", "whether it has adapters", ADAPTERS),
    *_of(f"{CONFIG}:LoRAConfig", "max_loras", "how many requests of a batch may have one", ADAPTERS),
    *_of("vllm.v1.engine:EngineCoreOutputs", "outputs scheduler_stats timestamp", "news of a step"),
    *_of("vllm.v1.engine:EngineCoreOutput", "request_id new_token_ids new_logprobs finish_reason", "news"),
    *_of("vllm.v1.engine:EngineCoreOutput", "pooling_output", "an embedding or a score"),
    *_of("vllm.v1.engine:EngineCoreOutput", "new_prompt_logprobs_tensors", "log-probabilities of a prompt"),
    *_of("vllm.v1.engine:EngineCoreOutput", "events", "when a request began, and what it lost"),
    *_of("vllm.v1.engine:EngineCoreOutput", "prefill_stats", "how much of a prompt was cached", CACHED),
    *_of("vllm.v1.engine:EngineCoreEvent", "type timestamp", "when a request began, and what it lost"),
    *_of("vllm.v1.engine:EngineCoreEventType", "SCHEDULED PREEMPTED", "when a request began, and what it lost"),
    *_of(f"{STATS}:PrefillStats", "num_cached_tokens", "how much of a prompt was cached", CACHED),
    *_of(f"{STATS}:SchedulerStats", "num_running_reqs kv_cache_usage", "a worker's load"),
    *_of(f"{STATS}:SchedulerStats", "iteration_details", "what a step took", STEP_TIMES),
    *_of(DETAILS, "is_dummy elapsed_ms num_ctx_tokens", "what a step took", STEP_TIMES),
    *_of(DETAILS, "num_ctx_requests num_generation_requests", "what a step took", STEP_TIMES),
    *_of(TRANSFER, "kv_connector kv_connector_module_path kv_role", "our connector", SHARING),
    *_of(TRANSFER, "kv_connector_extra_config", "the way to our process", SHARING),
    *_of(TRANSFER, "kv_load_failure_policy", "KV that does not come", SHARING),
    *_of(f"{CONFIG}:VllmConfig", "kv_transfer_config compilation_config", "our connector", SHARING),
    *_of(f"{CONFIG}:CompilationConfig", "static_forward_context", "which attention computes", SHARING),
    *_of("vllm.v1.attention.backend:AttentionBackend", "get_name", "which attention computes", SHARING),
    *_of(CONNECTOR, "KVConnectorBase_V1 KVConnectorMetadata", "our connector", SHARING),
    *_of(f"{CONNECTOR}:KVConnectorRole", "SCHEDULER", "which half it is", SHARING),
    *_of(f"{CONNECTOR}:KVConnectorBase_V1", "_vllm_config", "which attention computes", SHARING),
    *_of(f"{CONNECTOR}:KVConnectorBase_V1", "get_required_kvcache_layout", "blocks lie as in a slab", SHARING),
    *_of(f"{CONNECTOR}:KVConnectorBase_V1", "on_new_request request_finished", "a request's life", SHARING),
    *_of(f"{CONNECTOR}:KVConnectorBase_V1", "get_num_new_matched_tokens", "tokens that come from elsewhere", SHARING),
    *_of(f"{CONNECTOR}:KVConnectorBase_V1", "update_state_after_alloc", "their blocks", SHARING),
    *_of(f"{CONNECTOR}:KVConnectorBase_V1", "build_connector_meta bind_connector_metadata", "news of a step", SHARING),
    *_of(f"{CONNECTOR}:KVConnectorBase_V1", "register_kv_caches", "where the cache lies", SHARING),
    *_of(f"{CONNECTOR}:KVConnectorBase_V1", "start_load_kv wait_for_layer_load", "nothing is waited for", SHARING),
    *_of(f"{CONNECTOR}:KVConnectorBase_V1", "save_kv_layer wait_for_save", "what is computed", SHARING),
    *_of(f"{CONNECTOR}:KVConnectorBase_V1", "get_finished get_block_ids_with_load_errors", "what has come", SHARING),
    *_of(f"{CONNECTOR}:KVConnectorBase_V1", "get_mem_pool_context", "the cache is allocated in our memory", OLDER),
    *_of(CACHE, "FullAttentionSpec", "whose KV is shared", SHARING),
    *_of(f"{CONFIG}:CacheConfig", "kv_cache_layout", "the layout by its axes", OLDER),
    *_of(f"{CACHE}:KVCacheConfig", "kv_cache_tensors kv_cache_groups", "how large the cache is, and of what", SHARING),
    *_of(f"{CACHE}:KVCacheTensor", "size", "how large the cache is", SHARING),
    *_of(f"{CACHE}:KVCacheGroupSpec", "kv_cache_spec", "whose KV is shared", SHARING),
    *_of("vllm.v1.core.kv_cache_manager:KVCacheBlocks", "get_block_ids", "the blocks of a request", SHARING),
    *_of("vllm.v1.request:Request", "request_id kv_transfer_params num_tokens", "a request that shares KV", SHARING),
    *_of(f"{STEP}:SchedulerOutput", "preempted_req_ids num_scheduled_tokens", "what a step computes", SHARING),
    *_of(f"{STEP}:SchedulerOutput", "scheduled_new_reqs scheduled_cached_reqs", "what a step computes", SHARING),
    *_of(f"{STEP}:NewRequestData", "req_id num_computed_tokens block_ids", "what a step computes", SHARING),
    *_of(f"{STEP}:CachedRequestData", "req_ids num_computed_tokens new_block_ids", "what a step computes", SHARING),
    *_of("vllm.model_executor.layers.attention_layer_base:AttentionLayerBase", "get_attn_backend", "the same", SHARING),
    *_of("vllm.v1.sample.sampler:Sampler", "forward", "a draw is taken back", SEEDS),
    *_of("vllm.v1.sample.metadata:SamplingMetadata", "generators", "a draw is taken back", SEEDS),
)


def check_names(version: str, needed: Iterable[str], names: Iterable[Name] = NAMES) -> list[str]:
    """`needed`: features without which the worker cannot start. Raises ConfigError. Returns the arguments of vLLM's
    engine that features had which are off, and warns of these features."""
    lacking = list(missing(names))
    needed = {EVERYTHING, *needed}
    without = [name for name in lacking if name.feature in needed]
    if without:
        told = ", ".join(f"{name.path} ({name.use})" for name in without)
        raise ConfigError("workers.python", f"vLLM {version} lacks what Baton's workers use: {told}")
    off = sorted({name.feature for name in lacking} - {OLDER})
    for feature in off:
        paths = [name.path for name in lacking if name.feature == feature]
        log.warning("this vLLM lacks names: a feature is off", version=version, feature=feature, names=paths)
    return [argument for argument, feature in ARGUMENTS.items() if feature in off]


def missing(names: Iterable[Name] = NAMES) -> Iterator[Name]:
    for name in names:
        module, _, path = name.path.partition(":")
        try:
            found: Any = importlib.import_module(module)
        except ImportError:
            yield name
            continue
        for part in path.split("."):
            if not _has(found, part):
                yield name
                break
            found = getattr(found, part, None)


def _has(owner: Any, name: str) -> bool:
    """Also for a field that has no default, one that only __init__ or __post_init__ sets, a key of a TypedDict, and an
    argument."""
    tables = ("__dataclass_fields__", "__struct_fields__", "__required_keys__", "__optional_keys__")
    makers = (getattr(getattr(owner, maker, None), "__code__", None) for maker in ("__init__", "__post_init__"))
    called = getattr(owner, "__code__", None)
    return (
        hasattr(owner, name)
        or any(name in getattr(owner, table, ()) for table in tables)
        or any(made is not None and name in made.co_names for made in makers)
        or (called is not None and name in called.co_varnames[: called.co_argcount + called.co_kwonlyargcount])
    )
