"""`baton up` refuses what its workers would refuse, before it starts one."""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.cli.preflight import check_models, check_start
from baton.cli.room import check_gpus
from baton.service.launcher import Machines
from baton.service.wanted.configuration import wanted_models
from runtime.checkpoint.served_model import served_model
from runtime.config.serving import ServingConfig, parse_config
from runtime.errors import ConfigError

pytestmark = pytest.mark.slow

EXTERNAL = {
    "name": "gpu-7",
    "address": "http://127.0.0.1:9",
    "events": "tcp://127.0.0.1:9",
    "replay": "tcp://127.0.0.1:9",
    "api_key_file": "/no/key",
}
SHARED = {"url": "nats://127.0.0.1:9"}  # other services may have the workers that this one lacks
ALONE = {"external_workers": [EXTERNAL], "workers": {"prefill": 0, "decode": 0}}
NO_PREFILL = {"enabled": True, "limits": {"min_prefill": 0, "max_prefill": 0}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"workers": {"decode": 0}}, "workers.decode: 0 decode workers can answer nobody: start at least 1"),
    ({"workers": {"prefill": 0, "decode": 0}}, "workers.decode: 0"),
    (
        {"workers": {"prefill": {"vllm": 1}, "decode": 2}},
        "workers.prefill: a prefill worker with vllm sends KV to decode workers with vllm alone, and there is none:",
    ),
    (
        {"workers": {"prefill": 0, "decode": {"vllm": 2}}, "planner": {"enabled": True}},
        "planner.limits.max_prefill: a prefill worker with baton sends KV to decode workers with baton alone, and "
        "there is none: set it to 0, or workers.prefill: {vllm: 0}",
    ),
    ({"workers": {"decode": {"baton": 1, "vllm": 1}}}, "workers.python: names the interpreter of the environment"),
    (
        {"workers": {"prefill": 1, "decode": {"vllm": 0}}, "planner": {"enabled": True}, "nats": SHARED},
        "workers.python: names the interpreter of the environment",
    ),
    (
        {
            "workers": {"prefill": 0, "decode": {"vllm": 1}, "python": sys.executable},
            "planner": {"enabled": True},
            "engine": {"block_size": 32, "prefill_tensor_parallel": 8},
            "nats": SHARED,
        },
        "engine.tensor_parallel: ",
    ),
    ({"workers": {"host": "no.such.host.invalid"}}, "workers.host: 'no.such.host.invalid'"),
    ({"workers": {"host": "192.0.2.1"}}, "workers.host: '192.0.2.1': Cannot assign"),
    ({"engine": {"device": "cuda"}}, "engine.device: 'cuda'"),
    ({"engine": {"attention": "triton"}}, "engine.attention: 'triton' runs on GPUs alone: auto or torch"),
    ({"engine": {"kv_memory": "1KiB"}}, "engine.kv_memory: 1KiB is less than one KV block of"),
    ({"engine": {"kv_memory": "0 GB"}}, "engine.kv_memory: 0 GB is less than one KV block of"),
    ({"engine": {"tensor_parallel": 8}}, "engine.tensor_parallel: "),
    ({"engine": {"prefill_tensor_parallel": 8}}, "engine.tensor_parallel: "),
    ({"transfer": {"transport": "cuda_ipc"}}, "transfer.transport: 'cuda_ipc' cannot carry KV from here; can: auto"),
    ({"transfer": {"transport": "smh"}}, "transfer.transport: 'smh' is no transport; the nearest known one is 'shm'"),
    ({"planner": {"enabled": True, "journal": "/no/folder/x"}}, "planner.journal: /no/folder/x: its folder"),
    (
        {"router": {"generation_config": "atuo"}},
        "router.generation_config: 'atuo' is neither auto nor none, nor a folder",
    ),
    ({"model": "mock", "engine": {"tensor_parallel": 2}}, "engine.tensor_parallel: the mock model computes nothing"),
    ({"security": {"api_key_file": "/no/keys"}}, "security.api_key_file: /no/keys: No such file"),
    ({"security": {"tls_cert_file": "/no/cert"}}, "security.tls_"),
    ({"nats": {"credentials_file": "/no/token"}}, "nats.credentials_file: /no/token: No such file"),
    ({"external_workers": [EXTERNAL]}, "workers.prefill: external workers take no prompts of workers of ours"),
    (
        ALONE | {"external_workers": [EXTERNAL | {"role": "prefill"}]},
        "external_workers: all have role: prefill, and nobody answers: give one role: decode",
    ),
    (ALONE | {"planner": {"enabled": True}}, "planner.enabled: the planner cannot start external workers"),
    (ALONE | {"model": "mock"}, "external_workers: the mock model is our own engine's"),
    (ALONE, "external_workers.gpu-7.api_key_file: /no/key: No such file"),
]


@pytest.mark.skipif(Path("/proc/driver/nvidia/gpus").is_dir(), reason="a GPU is there, and more is possible")
@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=[str(changes) for changes, _ in REFUSED])
def test_up_refuses_before_it_starts_a_process(
    tiny_model: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = tmp_path / "serving.yaml"
    data = {"model": str(tiny_model), "router": {"http_port": 0, "grpc_port": 0}} | changes
    path.write_text(yaml.safe_dump(data))
    up = subprocess.run(
        [sys.executable, "-m", "baton", "up", "--json", "--config", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert up.returncode == 2, up.stderr
    assert '"event": "ready"' not in up.stdout  # of a process
    assert up.stderr.splitlines()[-1].startswith(f"error: {words}")
    assert "Traceback" not in up.stderr


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"workers": {"prefill": 0}},
        {"workers": {"decode": 0}, "planner": {"enabled": True}},  # the planner starts one
        {"workers": {"decode": 0}, "nats": SHARED},  # others may run them
        {"workers": {"prefill": {"vllm": 1}, "python": sys.executable}, "nats": SHARED},
        {"workers": {"prefill": 0, "decode": {"vllm": 1}, "python": sys.executable}, "planner": NO_PREFILL},
        {
            "workers": {"decode": {"baton": 1, "vllm": 1}, "python": sys.executable},
            "engine": {"host_kv_memory": "1MiB"},
        },
        {"workers": {"prefill": 0, "decode": {"vllm": 2}, "python": sys.executable}},
        {"engine": {"tensor_parallel": 2, "kv_memory": "1MiB"}},
        {"model": "mock", "engine": {"attention": "triton", "kv_memory": "1KiB"}},
    ],
    ids=str,
)
def test_what_can_run_is_let_through(tiny_model: Path, changes: dict[str, Any]) -> None:
    config = parse_config({"model": str(tiny_model)} | changes)
    check_start(config, served_model(config), Machines(0, 2))


SIZES: list[tuple[dict[str, Any], str]] = [
    (
        {"kv_memory": "900GiB"},
        r"engine\.kv_memory: 900GiB for each of 2 workers makes 1800\.0 GiB, but .* at most, or auto",
    ),
    (
        {"kv_memory": "900GiB", "tensor_parallel": 2},
        r"engine\.kv_memory: 900GiB for each of 4 ranks makes 3600\.0 GiB, ",
    ),
    ({"host_kv_memory": "900GiB"}, r"engine\.host_kv_memory: 900GiB for each of 2 workers makes 1800\.0 GiB, but "),
    (
        {"kv_memory": "1GiB", "host_kv_memory": "7GiB"},
        r"engine\.host_kv_memory: 7GiB .* 14\.0 GiB beside 2\.0 GiB of engine\.kv_memory, but 12\.0 GiB of memory is "
        r"free here: 5\.0GiB each at most, or auto$",
    ),
    (
        {"host_kv_memory": "8MiB", "disk_kv": {"folder": "kv", "size": "900000GiB"}},
        r"engine\.disk_kv\.size: 900000GiB for each of 2 workers makes .* is free in .*kv: .* each at most$",
    ),
    (
        {"kv_memory": "64KiB"},
        r"engine\.kv_memory: 64KiB holds a request of 64 tokens, and 256 tokens take 1MiB: set that or more, or auto$",
    ),
    (
        {"kv_memory": "1MiB", "max_model_len": 2048},
        r"engine\.kv_memory: 1MiB holds a request of 1024 tokens, and engine\.max_model_len, 2048, takes 2MiB: ",
    ),
    ({"host_kv_memory": "8KiB"}, r"engine\.host_kv_memory: 8KiB is less than one KV block of .*: 0 turns it off$"),
    (
        {"host_kv_memory": "8MiB", "disk_kv": {"folder": "kv", "size": "8KiB"}},
        r"engine\.disk_kv\.size: 8KiB has no room for one KV block of ",
    ),
]


@pytest.mark.parametrize(("engine", "words"), SIZES, ids=[str(engine) for engine, _ in SIZES])
def test_sizes_that_the_machine_has_not_or_that_serve_nobody_are_refused(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("baton.cli.room.available_bytes", lambda: 12 * 2**30)
    config = parse_config({"model": str(tiny_model), "engine": engine})
    with pytest.raises(ConfigError, match=f"^{words}"):
        check_start(config, served_model(config), Machines(0, 2))


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        (["0"], "900GiB for each of 2 workers makes 1800.0 GiB, but 78.0 GiB of a GPU is free"),
        (["0", "1"], "900GiB for one worker, but 78.0 GiB of a GPU is free"),
    ],
)
def test_kv_memory_that_no_gpu_has_is_refused(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, gpus: list[str], words: str
) -> None:
    monkeypatch.setattr("baton.cli.room.visible_gpus", lambda: gpus)
    monkeypatch.setattr("baton.cli.room.free_gpu_bytes", lambda gpus: [78 * 2**30] * len(gpus))
    check_gpus(parse_config({"model": str(tiny_model), "engine": {"kv_memory": "39GiB"}}))
    with pytest.raises(ConfigError, match=rf"^engine\.kv_memory: {words}, also for weights: auto takes"):
        check_gpus(parse_config({"model": str(tiny_model), "engine": {"kv_memory": "900GiB"}}))


def test_what_only_a_machine_can_tell_is_not_asked_before_a_cluster_is_there(tiny_model: Path) -> None:
    config = parse_config({"model": str(tiny_model), "engine": {"device": "cuda"}, "transfer": {"transport": "nccl"}})
    check_start(config, served_model(config), None)
    with pytest.raises(ConfigError, match=r"workers\.decode"):
        check_start(ServingConfig(workers=parse_config({"workers": {"decode": 0}}).workers), served_model(config), None)


def test_models_that_have_room_alone_and_not_together_are_refused(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.cli.room.available_bytes", lambda: 100 << 20)
    engine = {"kv_memory": "60MiB"}
    data = {"models": [{"name": name, "model": str(tiny_model), "engine": engine} for name in ("one", "two")]}
    services = wanted_models(parse_config(data | {"workers": {"prefill": 0}}), data)
    check_models(services[:1], Machines(0, 2))
    with pytest.raises(ConfigError, match=r"40\.0 MiB of memory is free here"):
        check_models(services, Machines(0, 2))


@pytest.mark.parametrize(
    ("budget", "second", "words"),
    [
        (4, {}, ""),
        (3, {}, "the least workers of 2 models take 4 GPUs, and 3 are the budget"),
        (3, {"asleep": "until_asked", "prefill": 0, "decode": 1}, ""),
        (2, {"asleep": "until_asked", "prefill": 0, "decode": 1}, "take 2 GPUs beside 1 for those that sleep, and 2"),
    ],
)
def test_models_whose_least_workers_have_no_room_together_are_refused(
    tiny_model: Path, budget: int, second: dict[str, Any], words: str
) -> None:
    models = [{"name": "one", "model": str(tiny_model)}, {"name": "two", "model": str(tiny_model)} | second]
    data = {"models": models, "planner": {"enabled": True, "limits": {"gpu_budget": budget}}}
    services = wanted_models(parse_config(data), data)
    with pytest.raises(ConfigError, match=words) if words else nullcontext():
        check_models(services, Machines(0, 8))
