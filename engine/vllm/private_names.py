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

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Name:
    """`path`: MODULE:NAME, or MODULE:CLASS.NAME of a method or a field."""

    path: str
    use: str
    feature: str = EVERYTHING  # that is off without it


CLIENT: Final = "vllm.v1.engine.core_client:AsyncMPClient"
OUTPUT: Final = "vllm.v1.engine:EngineCoreOutput"
STATS: Final = "vllm.v1.metrics.stats:SchedulerStats"
CONNECTOR: Final = "vllm.distributed.kv_transfer.kv_connector.v1.base"

NAMES: Final = (
    Name("vllm:__version__", "what is served"),
    Name("vllm:SamplingParams", "a request"),
    Name("vllm.inputs:TokensPrompt", "a request's prompt"),
    Name("vllm.sampling_params:StructuredOutputsParams", "a request's grammar"),
    Name("vllm.config:KVEventsConfig", "KV events"),
    Name("vllm.config:KVTransferConfig", "our connector", SHARING),
    Name("vllm.config:StructuredOutputsConfig", "the library of grammars"),
    Name("vllm.platforms:current_platform", "CPU or GPU"),
    Name("vllm.engine.arg_utils:AsyncEngineArgs", "the start's arguments"),
    Name("vllm.v1.engine.async_llm:AsyncLLM.from_engine_args", "the start"),
    Name("vllm.v1.engine.async_llm:AsyncLLM.shutdown", "the end"),
    Name("vllm.v1.engine.input_processor:InputProcessor.process_inputs", "the checks of a request"),
    Name(f"{CLIENT}.add_request_async", "requests go past AsyncLLM's queues"),
    Name(f"{CLIENT}.abort_requests_async", "the same"),
    Name(f"{CLIENT}.get_output_async", "the news of a step stay together"),
    Name(f"{CLIENT}.sleep_async", "memory is given back", SLEEP),
    Name(f"{CLIENT}.wake_up_async", "and taken again", SLEEP),
    Name(f"{CLIENT}.reset_prefix_cache_async", "a cache that sleeps is empty", SLEEP),
    Name(f"{CLIENT}.collective_rpc_async", "weights are read again", SLEEP),
    Name(f"{OUTPUT}.request_id", "news"),
    Name(f"{OUTPUT}.new_token_ids", "news"),
    Name(f"{OUTPUT}.new_logprobs", "news"),
    Name(f"{OUTPUT}.new_prompt_logprobs_tensors", "news"),
    Name(f"{OUTPUT}.finish_reason", "news"),
    Name(f"{OUTPUT}.events", "when a request began, and what it lost"),
    Name(f"{STATS}.num_running_reqs", "a worker's load"),
    Name(f"{STATS}.kv_cache_usage", "a worker's load"),
    Name(f"{STATS}.iteration_details", "what a step took", STEP_TIMES),
    Name(f"{CONNECTOR}:KVConnectorBase_V1", "our connector", SHARING),
    Name(f"{CONNECTOR}:KVConnectorMetadata", "our connector", SHARING),
    Name(f"{CONNECTOR}:KVConnectorRole", "our connector", SHARING),
    Name("vllm.v1.kv_cache_interface:FullAttentionSpec", "whose KV is shared", SHARING),
    Name("vllm.v1.sample.sampler:Sampler.forward", "a draw is taken back", SEEDS),
)
OF_LLM: Final = ("engine_core", "input_processor", "output_handler", "vllm_config")
"""Attributes of an AsyncLLM, which it has when it was made."""


def check_names(version: str, needed: Iterable[str], names: Iterable[Name] = NAMES) -> None:
    """`needed`: features without which the worker cannot start. Raises ConfigError; warns of features that are off."""
    lacking = list(missing(names))
    needed = {EVERYTHING, *needed}
    without = [name for name in lacking if name.feature in needed]
    if without:
        told = ", ".join(f"{name.path} ({name.use})" for name in without)
        raise ConfigError("workers.python", f"vLLM {version} lacks what Baton's workers use: {told}")
    for feature in sorted({name.feature for name in lacking}):
        paths = [name.path for name in lacking if name.feature == feature]
        log.warning("this vLLM lacks names: a feature is off", version=version, feature=feature, names=paths)


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
    """Also for a field that has no default."""
    fields = (*getattr(owner, "__dataclass_fields__", ()), *getattr(owner, "__struct_fields__", ()))
    return hasattr(owner, name) or name in fields
