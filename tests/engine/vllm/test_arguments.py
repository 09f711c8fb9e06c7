"""serving.yaml as arguments of vLLM's engine, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from engine.vllm.arguments import CPU_EXTENSION, OWNED, check_vllm, vllm_arguments
from engine.vllm.versions import check_version
from runtime.config.serving import parse_config
from runtime.errors import ConfigError

KNOWN = {
    *(*OWNED, "structured_outputs_config", "scheduling_policy", "generation_config"),
    *("quantization", "seed", "async_scheduling", "enforce_eager", "enable_lora", "max_loras"),
}
VLLM = {"prefill": 0, "engine": "vllm"}
APART = {"prefill": 1, "engine": "vllm"}
RANKS = {"block_size": 32, "tensor_parallel": 2}


def arguments(data: dict[str, Any], *, on_cpu: bool = True) -> dict[str, Any]:
    config = parse_config({"workers": VLLM, "engine": {"block_size": 32}} | data)
    check_vllm(config)
    return vllm_arguments(config, Path("/m"), {"publisher": "zmq"}, KNOWN, on_cpu=on_cpu)


def test_the_section_engine_is_translated_and_the_section_vllm_is_passed_on() -> None:
    engine = {"block_size": 64, "max_batch_tokens": 4096, "max_running": 99, "kv_memory": "1GiB", "max_model_len": 77}
    told = arguments({"engine": engine, "vllm": {"quantization": "fp8"}}, on_cpu=False)
    assert (told["block_size"], told["max_num_batched_tokens"], told["max_num_seqs"]) == (64, 4096, 99)
    assert (told["kv_cache_memory_bytes"], told["max_model_len"]) == (1 << 30, 77)
    assert (told["quantization"], told["enforce_eager"], told["dtype"]) == ("fp8", False, "auto")


def test_a_cpu_computes_in_float32_with_a_small_cache_and_without_a_compiler() -> None:
    told = arguments({})
    assert (told["dtype"], told["enforce_eager"], told["kv_cache_memory_bytes"]) == ("float32", True, 512 << 20)


@pytest.mark.parametrize(("on_cpu", "places"), [(True, 2), (False, 1)])
def test_adapters_have_places_and_on_a_cpu_the_last_one_stays_empty(tmp_path: Path, on_cpu: bool, places: int) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    told = arguments({"adapters": {"sql": str(tmp_path)}}, on_cpu=on_cpu)
    assert (told["enable_lora"], told["max_loras"]) == (True, places)
    assert arguments({"adapters": {"sql": str(tmp_path)}, "vllm": {"max_loras": 7}}, on_cpu=on_cpu)["max_loras"] == 7
    assert "enable_lora" not in arguments({}, on_cpu=on_cpu)
    with pytest.raises(ConfigError, match=r"adapters\.sql: /nowhere has no adapter_config\.json"):
        arguments({"adapters": {"sql": "/nowhere"}})


def test_random_streams_are_wound_back_by_us_on_cpus_alone() -> None:
    assert arguments({})["worker_extension_cls"] == CPU_EXTENSION
    assert "worker_extension_cls" not in arguments({}, on_cpu=False)


def test_an_argument_that_this_version_does_not_know_is_left_out_if_it_is_baton_s_and_refused_if_the_users() -> None:
    assert "enable_prefix_caching" in arguments({})
    with pytest.raises(ConfigError, match=r"vllm\.quantisation: .* nearest known one is 'quantization'"):
        arguments({"vllm": {"quantisation": "fp8"}})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"vllm": {"block_size": 16}}, r"vllm\.block_size: set engine\.block_size instead"),
        ({"vllm": {"kv_events_config": {}}}, r"vllm\.kv_events_config: Baton sets it; leave it out"),
        ({"engine": {"host_kv_memory": "1GiB"}}, r"engine\.host_kv_memory: vLLM has no such thing"),
        ({"workers": VLLM | {"per_process": 2}}, r"workers\.per_process: each worker with vLLM"),
        ({"engine": {"dtype": "fp8"}}, r"engine\.dtype: .* vLLM takes `vllm: \{quantization: fp8\}`"),
        ({"engine": {"kv_dtype": "fp8"}}, r"engine\.kv_dtype: .* vLLM takes `vllm: \{kv_cache_dtype: fp8\}`"),
        ({"model": "mock"}, r"workers\.engine: the mock model is our own"),
        ({"engine": RANKS, "planner": {"enabled": True}}, r"planner\.limits\.max_prefill: .* set it to 0"),
        ({"workers": APART, "vllm": {"async_scheduling": True}}, r"vllm\.async_scheduling: .* leave it out"),
        ({"engine": RANKS, "workers": APART}, r"workers\.prefill: vLLM's workers of several ranks .* set it to 0"),
    ],
)
def test_what_a_worker_with_vllm_cannot_do_is_refused_by_name(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arguments(data)


def test_no_step_is_scheduled_early_where_prompts_run_apart_from_answers() -> None:
    for on_cpu in (True, False):
        assert arguments({"workers": APART}, on_cpu=on_cpu)["async_scheduling"] is False
        assert arguments({"vllm": {"async_scheduling": True}}, on_cpu=on_cpu)["async_scheduling"] is True


@pytest.mark.parametrize("version", ["0.25.1", "0.9.2", "unknown"])
def test_a_version_that_is_too_old_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=r"need 0\.26 or newer"):
        check_version(version)


def test_a_newer_version_may_be_tried() -> None:
    check_version("0.32.0")
    check_version("0.40.1+cu130")
