"""Finds before any process starts what a worker would refuse after it has loaded its model."""

from collections.abc import Sequence
from pathlib import Path

from baton.cli.room import check_disk, check_gpus, check_least, check_memory, check_threads, host_memory_of
from baton.service.launcher import Machines, uses_gpus
from baton.service.local.nats_server import STORE_KEY
from baton.service.planning.budget import gpu_budget, gpus_per_worker, gpus_together, has_own_budget
from baton.service.wanted.configuration import Wanted
from baton_proto.planner import DECODE, PREFILL
from engine.model.shard import shard_of
from engine.tiers.disk_kv import check_disk_kv, check_folder
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.transports.table import check_choice, choices, offered
from router.api.wishes.sampling_options import chosen_defaults
from router.batches.folder import BatchFolder
from runtime.checkpoint.model_config import served_dtype
from runtime.checkpoint.model_files import ModelFiles
from runtime.checkpoint.served_model import is_mock
from runtime.config.serving import EngineConfig, ServingConfig, for_prefill_worker
from runtime.device.driver import MemoryKind
from runtime.errors import ConfigError
from runtime.own_files import make_folder
from runtime.processes.other_python import interpreter
from runtime.processes.ports import try_to_listen
from runtime.security.secret import read_secrets
from runtime.security.tls import trusting
from worker.engines.table import rows_of


def check_models(services: Sequence[Wanted], machines: Machines) -> None:
    """Raises ConfigError for what one model cannot have beside the others."""
    taken = 0
    for service in services:
        check_start(service.config, service.files, machines, taken)
        if not is_mock(service.config):
            taken += sum(host_memory_of(service.config, _kv_memory(service.config, machines)))
    if len(services) > 1:
        _check_shares([service.config for service in services if not has_own_budget(service.config)], machines)


def _check_shares(models: Sequence[ServingConfig], machines: Machines) -> None:
    """Raises ConfigError when the least workers that planners keep have no room together, beside models that sleep."""
    planned = [model for model in models if model.planner.enabled]
    if not planned:
        return
    least = 0
    for model in planned:
        gpus, limits = gpus_per_worker(model, machines), model.planner.limits
        least += gpus[PREFILL] * limits.min_prefill + gpus[DECODE] * limits.min_decode
    asleep = [gpus_together(model, machines) for model in models if not model.planner.enabled]
    budget, kept = gpu_budget(planned[0], machines), max(asleep, default=0)
    if least + kept > budget:
        takes = f"the least workers of {len(planned)} models take {least} GPUs" + (
            f" beside {kept} for those that sleep" if kept else ""
        )
        raise ConfigError("planner.limits.gpu_budget", f"{takes}, and {budget} are the budget: lower min_prefill")


def check_start(config: ServingConfig, files: ModelFiles, machines: Machines | None, beside: int = 0) -> None:
    """`machines` None: nobody knows them yet. `beside`: bytes of host memory that other models may take. Raises
    ConfigError."""
    _check_external(config)
    others = config.planner.enabled or config.nats.url is not None or config.external_workers
    if config.workers.count("decode") == 0 and not others:
        raise ConfigError("workers.decode", "0 decode workers can answer nobody: start at least 1 (--decode 1)")
    chosen_defaults(config.router.generation_config, files.folder)
    check_choice(config.transfer.transport)
    check_disk_kv(config.engine)
    if machines is not None:
        _check_machine(config, machines, beside)
    if config.external_workers and not config.workers.count("decode"):
        return
    _check_pairs(config)
    for row in rows_of(config):
        row.checked(config)
        if row.needs:
            interpreter(config, row.name, row.needs)
    if not config.uses("baton"):
        return
    if not is_mock(config):
        on_gpu = machines is None or uses_gpus(config, machines)
        _check_engine(config.engine, files, on_gpu)
        if config.may_have("prefill"):
            _check_engine(for_prefill_worker(config).engine, files, on_gpu)
    elif config.engine.tensor_parallel > 1:
        raise ConfigError("engine.tensor_parallel", "the mock model computes nothing that could be shared: 1")


def _check_external(config: ServingConfig) -> None:
    """Raises ConfigError for what external workers cannot do."""
    if not config.external_workers:
        return
    if is_mock(config):
        raise ConfigError("external_workers", "the mock model is our own engine's: name the model that they serve")
    if config.workers.count("prefill"):
        raise ConfigError("workers.prefill", "external workers take no prompts of workers of ours: set it to 0")
    if {external.role for external in config.external_workers} == {"prefill"} and not config.workers.count("decode"):
        raise ConfigError("external_workers", "all have role: prefill, and nobody answers: give one role: decode")
    if config.planner.enabled:
        raise ConfigError("planner.enabled", "the planner cannot start external workers: set it to false")
    for external in config.external_workers:
        if external.api_key_file is not None:
            read_secrets(external.api_key_file, f"{external.where}.api_key_file")
        if external.ca_file is not None:
            trusting(external.ca_file, f"{external.where}.ca_file")


def _check_pairs(config: ServingConfig) -> None:
    """Raises ConfigError for prefill workers whose KV no decode worker of this service takes. With a NATS server that
    other services use too, those may have the decode workers."""
    if not config.may_have("prefill") or config.nats.url is not None:
        return
    decode = config.workers.by_engine("decode")
    for engine in config.workers.by_engine("prefill").keys() - decode.keys():
        problem = f"a prefill worker with {engine} sends KV to decode workers with {engine} alone, and there is none"
        if config.workers.count("prefill"):
            raise ConfigError("workers.prefill", f"{problem}: set it to 0, or name the same engine in both roles")
        named = f"workers.prefill: {{{next(iter(decode))}: 0}}"
        raise ConfigError("planner.limits.max_prefill", f"{problem}: set it to 0, or {named}")


def _kv_memory(config: ServingConfig, machines: Machines) -> MemoryKind:
    return "cuda" if uses_gpus(config, machines) else "host"


def _check_machine(config: ServingConfig, machines: Machines, beside: int) -> None:
    engine, host, transport = config.engine, config.workers.host, config.transfer.transport
    memory = _kv_memory(config, machines)
    if engine.device == "cuda" and not is_mock(config) and not machines.gpus:
        raise ConfigError("engine.device", "'cuda' asks for an NVIDIA GPU and this machine has none: auto or cpu")
    if engine.attention in ("triton", "flash") and memory == "host" and not is_mock(config):
        raise ConfigError("engine.attention", f"{engine.attention!r} runs on GPUs alone: auto or torch")
    check_threads(config)
    check_folder(engine)
    if not is_mock(config):
        check_memory(config, memory, beside)
        if memory == "cuda":
            check_gpus(config)
        check_disk(config)
    if config.nats.url is None and config.nats.store_dir is not None:
        make_folder(Path(config.nats.store_dir).expanduser(), STORE_KEY)
    if config.router.batch_folder is not None:
        BatchFolder(Path(config.router.batch_folder).expanduser())
    if not offered(transport, memory):
        able = [choice for choice in choices() if offered(choice, memory)]
        raise ConfigError("transfer.transport", f"{transport!r} cannot carry KV from here; can: {', '.join(able)}")
    try:
        try_to_listen(host)
    except OSError as error:
        raise ConfigError("workers.host", f"{host!r}: {error.strerror or error}") from error
    journal = config.planner.journal
    if config.planner.enabled and journal and not Path(journal).expanduser().absolute().parent.is_dir():
        raise ConfigError("planner.journal", f"{journal}: its folder does not exist")


def _check_engine(engine: EngineConfig, files: ModelFiles, on_gpu: bool) -> None:
    dtype = engine.stored_dtype(served_dtype(files.config.dtype, engine.dtype, on_gpu=on_gpu))
    model = shard_of(files.config, 0, engine.tensor_parallel).config
    layout = SlabLayout(model.num_layers, 1, model.num_kv_heads, engine.block_size, model.head_dim, dtype)
    check_least(engine, files, layout)
