"""serving.yaml: what is accepted, what is refused, and that the message helps."""

from pathlib import Path
from typing import Any

import pytest

from runtime.config.commented import commented
from runtime.config.overrides import nested, with_overrides
from runtime.config.paths import with_absolute_paths
from runtime.config.serving import (
    AUTO_KEYS,
    ServingConfig,
    dump_config,
    for_prefill_worker,
    load_config,
    parse_bytes,
    parse_config,
)
from runtime.errors import ConfigError


def test_no_file_gives_the_defaults() -> None:
    assert load_config(None) == ServingConfig()


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "serving.yaml").write_text("# nothing\n")
    assert load_config(tmp_path / "serving.yaml") == ServingConfig()


def test_a_file_that_is_left_out_in_parts_keeps_the_other_defaults() -> None:
    config = parse_config({"router": {"placement": {"local_prefill_tokens": 5}}})
    assert config.router.placement.local_prefill_tokens == 5
    assert config.router.http_port == ServingConfig().router.http_port


def test_what_is_dumped_is_what_is_loaded(tmp_path: Path) -> None:
    config = parse_config(
        {"model": "/m", "engine": {"kv_memory": "1GiB", "max_model_len": 100}, "nats": {"url": "nats://h:1"}}
    )
    (tmp_path / "serving.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "serving.yaml") == config


@pytest.mark.parametrize(
    ("data", "key", "nearest"),
    [
        ({"modle": "x"}, "modle", "'model'"),
        ({"router": {"grpc-port": 1}}, "router.grpc-port", "'router.grpc_port'"),
        ({"planner": {"targets": {"ttft_m": 1}}}, "planner.targets.ttft_m", "'planner.targets.ttft_ms'"),
        ({"engine": {"kv_mem": "1GiB"}}, "engine.kv_mem", "'engine.kv_memory'"),
    ],
)
def test_an_unknown_key_is_refused_and_the_nearest_known_one_named(data: Any, key: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(data, "serving.yaml")
    assert caught.value.where == f"serving.yaml: {key}"
    assert nearest in caught.value.problem


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"router": {"http_port": 70000}}, "router.http_port"),
        ({"router": {"http_port": "8000"}}, "router.http_port"),
        ({"workers": {"prefill": -1}}, "workers.prefill"),
        ({"engine": {"block_size": 17}}, "engine.block_size"),
        ({"engine": {"device": "tpu"}}, "engine.device"),
        ({"transfer": {"checksum": "maybe"}}, "transfer.checksum"),
        ({"planner": {"policy": "guess"}}, "planner.policy"),
        ({"planner": {"targets": {"attainment": 1}}}, "planner.targets.attainment"),
        ({"planner": {"limits": {"max_prefill": 0}}}, "planner.limits"),
        ({"planner": {"limits": {"min_decode": 4, "gpu_budget": 4}}}, "planner.limits"),
        ({"namespace": "Has Spaces"}, "namespace"),
        ({"router": [1]}, "router"),
        ([1, 2], "top level"),
        ("text", "top level"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_key(data: Any, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(data)
    assert caught.value.where == f"configuration: {key}"


@pytest.mark.parametrize("text", ["a: [", "a: b: c", "\tx: 1", "\x00"])
def test_a_file_that_is_no_yaml_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        load_config(path)


def test_a_missing_file_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: No such file"):
        load_config(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("text", "count"),
    [("512MiB", 512 * 2**20), ("1.5 GiB", 3 * 2**29), ("10KB", 10_000), ("2GB", 2 * 10**9), ("77", 77), ("77B", 77)],
)
def test_sizes_are_read_in_their_units(text: str, count: int) -> None:
    assert parse_bytes(text, "engine.kv_memory") == count


@pytest.mark.parametrize("text", ["", "MiB", "-1GiB", "1 TiBs", "1,5GiB", "1e3"])
def test_a_size_that_is_none_is_refused_by_its_key(text: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.kv_memory"):
        parse_bytes(text, "engine.kv_memory")


def test_overrides_change_single_keys_and_leave_the_rest() -> None:
    base = parse_config({"planner": {"interval_s": 1.0, "targets": {"ttft_ms": 3.0}}, "workers": {"prefill": 3}})
    config = with_overrides(base, {"planner": {"targets": {"itl_ms": 7.0}}, "workers": {"decode": 4}})
    assert config.planner.interval_s == 1.0
    assert (config.planner.targets.ttft_ms, config.planner.targets.itl_ms) == (3.0, 7.0)
    assert (config.workers.prefill, config.workers.decode) == (3, 4)
    assert with_overrides(base, {}) == base


def test_overrides_are_checked_like_the_file() -> None:
    with pytest.raises(ConfigError, match=r"command line: workers\.prefill"):
        with_overrides(ServingConfig(), {"workers": {"prefill": -1}})
    with pytest.raises(ConfigError, match=r"nearest known one is 'transfer\.transport'"):
        with_overrides(ServingConfig(), {"transfer": {"transports": "shm"}})


def test_serving_yaml_is_what_baton_config_prints() -> None:
    path = Path(__file__).parents[3] / "serving.yaml"
    assert path.read_text() == commented(), "write it anew: baton config > serving.yaml"
    assert load_config(path) == ServingConfig()


@pytest.mark.parametrize(
    ("data", "key", "told"),
    [
        ({"router": {"placement": {"ship_ms": 1.0}}}, "router.placement.ship_ms", "is a constant now, because"),
        ({"router": {"charge_sharing": {"ttl_s": 1.0}}}, "router.charge_sharing.ttl_s", "is a constant now"),
        ({"planner": {"delays": {"retry_s": 1.0}}}, "planner.delays.retry_s", "is a constant now"),
        ({"planner": {"delays": {"start_s": 9.0}}}, "planner.delays.start_s", "is planner.start_s now"),
        (
            {"planner": {"slo": {"profile": {"decode_floor_ms": 1.0}}}},
            "planner.slo.profile.decode_floor_ms",
            "step_times",
        ),
        ({"mock": {"kv_blocks": 1, "decode_floor_ms": 1.0}}, "mock.decode_floor_ms", "step_times"),
        ({"ray": {"capacity_timeout_s": 1.0}}, "ray.capacity_timeout_s", "is twice planner.start_s now"),
        ({"telemetry": {"traces": {"enabled": True}}}, "telemetry.traces.enabled", "OTEL_EXPORTER_OTLP_ENDPOINT or"),
        ({"transfer": {"connect_timeout_s": 9.0}}, "transfer.connect_timeout_s", "is a constant now"),
        ({"nats": {"token_file": "x"}}, "nats.token_file", "nats.credentials_file takes"),
        ({"engine": {"quantization": "fp8"}}, "engine.quantization", "engine.dtype takes fp8"),
        ({"router": {"max_buffered_bytes": 1}}, "router.max_buffered_bytes", "is 32 times router.max_body_bytes now"),
    ],
)
def test_a_key_that_left_is_refused_with_what_replaced_it(data: Any, key: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(data, "serving.yaml")
    assert caught.value.where == f"serving.yaml: {key}"
    assert told in caught.value.problem


def test_a_prefill_worker_has_ranks_of_its_own_where_they_are_set() -> None:
    config = parse_config({"engine": {"tensor_parallel": 2, "prefill_tensor_parallel": 4}})
    assert for_prefill_worker(config).engine.tensor_parallel == 4
    assert for_prefill_worker(parse_config({"engine": {"tensor_parallel": 2}})).engine.tensor_parallel == 2


@pytest.mark.parametrize("text", ["[" * 3000, "a: " * 3000, "!!timestamp x", "!!bool x", "\xff: [", "d: 2026-99-99"])
def test_a_file_that_is_no_configuration_is_a_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "serving.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"serving\.yaml"):
        load_config(tmp_path / "serving.yaml")


def test_auto_is_the_same_as_leaving_a_number_out() -> None:
    keys = dict.fromkeys(AUTO_KEYS, "auto")
    assert parse_config({"engine": keys}) == ServingConfig()
    with pytest.raises(ConfigError, match=r"engine\.max_model_len"):
        parse_config({"engine": {"max_model_len": "auto"}})


def test_a_nats_server_is_named_with_one_of_its_schemes_or_without() -> None:
    for url in ("nats://h:4222", "tls://me:secret@h:4222", "h:4222"):
        assert parse_config({"nats": {"url": url}}).nats.url == url


def test_a_size_beyond_any_machine_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="more than any machine has"):
        parse_bytes("9" * 400, "engine.kv_memory")


def test_arguments_of_vllm_have_names() -> None:
    assert parse_config({"vllm": {"quantization": "fp8"}}).vllm == {"quantization": "fp8"}
    with pytest.raises(ConfigError, match="vllm: 5 is not a name"):
        parse_config({"vllm": {5: "fp8"}})


def test_a_folder_with_the_sampling_parameters_is_found_from_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ({"router": {"generation_config": chosen}} for chosen in ("auto", "none", "mine"))
    found = [with_absolute_paths(parse_config(one)).router.generation_config for one in given]
    assert found == ["auto", "none", str(tmp_path / "mine")]


def test_usage_and_batches_are_found_from_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = with_absolute_paths(parse_config({"router": {"batch_folder": "b"}, "logging": {"usage": "u"}}))
    assert (found.router.batch_folder, found.logging.usage) == (str(tmp_path / "b"), str(tmp_path / "u"))
    assert with_absolute_paths(parse_config(nested("logging.usage=-"))).logging.usage == "-"


@pytest.mark.parametrize(
    ("prefill", "planner", "ms"),
    [
        (1, {}, 45.0),
        (0, {}, 50.0),
        (0, {"enabled": True}, 45.0),
        (0, {"enabled": True, "limits": {"min_prefill": 0, "max_prefill": 0}}, 50.0),
    ],
)
def test_steps_beside_answers_are_shorter_where_prompts_may_have_workers_of_their_own(
    prefill: int, planner: dict[str, Any], ms: float
) -> None:
    config = with_overrides(ServingConfig(), {"workers": {"prefill": prefill}, "planner": planner})
    assert (config.step_targets.itl_ms, config.step_targets.ttft_ms) == (ms, 1000.0)
    assert config.planner.targets.itl_ms == 50.0
