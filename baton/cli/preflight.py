"""Finds before any process starts what a worker would refuse after it has loaded its model."""

import socket
from collections.abc import Iterator
from pathlib import Path

from baton.service.launcher import Machines, uses_gpus
from engine.model.shard import shard_of
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.transports.table import check_choice, choices, offered
from runtime.checkpoint.model_files import ModelFiles
from runtime.checkpoint.served_model import is_mock
from runtime.config.serving import ServingConfig, for_prefill_worker, parse_bytes
from runtime.device.driver import MemoryKind
from runtime.errors import ConfigError


def check_start(config: ServingConfig, files: ModelFiles, machines: Machines | None) -> None:
    """`machines` None: nobody knows them yet. Raises ConfigError."""
    workers, on_gpu = config.workers, machines is None or uses_gpus(config, machines)
    if workers.decode == 0 and not config.planner.enabled and config.nats.url is None:
        raise ConfigError("workers.decode", "0 decode workers can answer nobody: start at least 1 (--decode 1)")
    check_choice(config.transfer.transport)
    if machines is not None:
        _check_machine(config, on_gpu, machines.gpus)
    dtype = config.engine.dtype if config.engine.dtype != "auto" else files.config.dtype if on_gpu else "float32"
    for each in _engines(config):
        _check_engine(each, files, dtype)


def _engines(config: ServingConfig) -> Iterator[ServingConfig]:
    yield config
    if config.workers.prefill or config.planner.enabled:
        yield for_prefill_worker(config)


def _check_machine(config: ServingConfig, on_gpu: bool, gpus: int) -> None:
    engine, transport = config.engine, config.transfer.transport
    if engine.device == "cuda" and not is_mock(config) and not gpus:
        raise ConfigError("engine.device", "'cuda' asks for an NVIDIA GPU and this machine has none: auto or cpu")
    if engine.attention in ("triton", "flash") and not on_gpu and not is_mock(config):
        raise ConfigError("engine.attention", f"{engine.attention!r} runs on GPUs alone: auto or torch")
    memory: MemoryKind = "cuda" if on_gpu else "host"
    if not offered(transport, memory):
        able = [choice for choice in choices() if offered(choice, memory)]
        raise ConfigError("transfer.transport", f"{transport!r} cannot carry KV from here; can: {', '.join(able)}")
    try:
        socket.create_server((config.workers.host, 0), family=_family(config.workers.host)).close()
    except OSError as error:
        raise ConfigError("workers.host", f"{config.workers.host!r}: {error.strerror or error}") from error
    journal = config.planner.journal
    if config.planner.enabled and journal and not Path(journal).expanduser().absolute().parent.is_dir():
        raise ConfigError("planner.journal", f"{journal}: its folder does not exist")


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]


def _check_engine(config: ServingConfig, files: ModelFiles, dtype: str) -> None:
    engine = config.engine
    if is_mock(config):
        if engine.tensor_parallel > 1:
            raise ConfigError("engine.tensor_parallel", "the mock model computes nothing that could be shared: 1")
        return
    model = shard_of(files.config, 0, engine.tensor_parallel).config
    layout = SlabLayout(model.num_layers, 1, model.num_kv_heads, engine.block_size, model.head_dim, dtype)
    if engine.kv_memory.strip() != "auto" and parse_bytes(engine.kv_memory, "engine.kv_memory") < layout.nbytes:
        one = f"one KV block of {files.name}, {layout.nbytes} bytes"
        raise ConfigError("engine.kv_memory", f"{engine.kv_memory} is less than {one}; auto takes what is right here")
