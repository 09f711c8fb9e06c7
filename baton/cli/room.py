"""Compares the sizes in a configuration with what is free on this machine, and with the least that serves."""

import os
from pathlib import Path

from baton.cli.terminal.output import human_bytes
from baton.service.gpu_places import GpuPlaces, visible_gpus
from baton_proto.planner import DECODE, PREFILL
from engine.tiers.block_files import slot_bytes
from engine.tiers.disk_kv import KEY as DISK_KEY
from engine.tiers.host_kv import KEY as HOST_KEY
from kvtransfer.slab.layout import SlabLayout
from runtime.checkpoint.model_files import ModelFiles
from runtime.checkpoint.served_model import is_mock
from runtime.config.serving import EngineConfig, ServingConfig, for_prefill_worker, parse_bytes
from runtime.config.workers import WorkerEngine
from runtime.device.available_memory import available_bytes
from runtime.device.driver import MemoryKind
from runtime.device.gpu_memory import free_gpu_bytes
from runtime.errors import ConfigError
from runtime.processes.available_threads import available_threads

KV_KEY = "engine.kv_memory"
THREADS = 36  # of the supervisor, NATS and the router, measured
WORKER_THREADS = 14  # of a worker that computes nothing
LEAST_TOKENS = 256  # of prompt and answer, that a worker should have room for where no longest request is configured


def host_memory_of(config: ServingConfig, memory: MemoryKind) -> tuple[int, int]:
    """Bytes of this machine's own memory that the workers may take for KV blocks, and for the host tier. `memory`: what
    KV blocks lie in."""
    kv = host = 0
    for engine, kind, count in _workers(config):
        ranks = count * engine.tensor_parallel
        kv += ranks * _bytes(engine.kv_memory, KV_KEY) * (memory == "host")
        host += ranks * _bytes(engine.host_kv_memory, HOST_KEY) * (kind == "baton")
    return kv, host


def check_memory(config: ServingConfig, memory: MemoryKind, taken: int = 0) -> None:
    """`taken`: bytes that other models' workers may take. Raises ConfigError when the workers may take more of this
    machine's own memory than is free."""
    kv, host = host_memory_of(config, memory)
    num_ranks = sum(count * engine.tensor_parallel for engine, _, count in _workers(config))
    free = max(0, available_bytes() - taken)
    if kv + host <= free:
        return
    key, value, rest, others = KV_KEY, config.engine.kv_memory, free - host, host
    if host and kv < free:
        key, value, rest, others = HOST_KEY, config.engine.host_kv_memory, free - kv, kv
    beside = f" beside {human_bytes(others)} of {HOST_KEY if key == KV_KEY else KV_KEY}" if others else ""
    free_here = f"{human_bytes(free)} of memory is free here"
    each = _each(value, num_ranks, "worker" if num_ranks == config.workers.total else "rank")
    raise ConfigError(key, f"{each}{beside}, but {free_here}: {_at_most(rest, num_ranks)}, or auto")


def check_threads(config: ServingConfig) -> None:
    """Raises ConfigError when this machine lets us start fewer threads and processes than the service has."""
    workers = config.workers.total + len(config.external_workers)
    alone = config.workers.per_process == 1 or not is_mock(config)
    wanted = THREADS + WORKER_THREADS * (workers if alone else min(1, workers))
    if (free := available_threads()) < wanted:
        problem = f"{free:.0f} more threads and processes may be started here, and this service has {wanted} or more"
        ways = "ulimit -u, docker run --pids-limit, TasksMax= of systemd"
        raise ConfigError("workers", f"{problem}: let it have more ({ways}), or start fewer workers")


def check_gpus(config: ServingConfig) -> None:
    """Raises ConfigError when the workers that share a GPU may take more of it for KV blocks than is free."""
    gpus = visible_gpus()
    free, kv = free_gpu_bytes(gpus), _bytes(config.engine.kv_memory, KV_KEY)
    ranks = [engine.tensor_parallel for engine, _, count in _workers(config) for _ in range(count)]
    num_workers = GpuPlaces(gpus, ranks).share
    if free and kv * num_workers > min(free):
        wanted, there = _each(config.engine.kv_memory, num_workers), f"{human_bytes(min(free))} of a GPU is free"
        raise ConfigError(KV_KEY, f"{wanted}, but {there}, also for weights: auto takes what they leave")


def check_disk(config: ServingConfig) -> None:
    """The folder is there. Raises ConfigError when the workers' files may take more than its disk has."""
    disk = config.engine.disk_kv
    if disk.folder is None:
        return
    folder = Path(disk.folder).expanduser()
    num_workers = sum(count for _, kind, count in _workers(config) if kind == "baton")
    system = os.statvfs(folder)
    taken = sum(path.lstat().st_blocks * 512 for path in folder.glob("*/*/blocks*"))  # by earlier workers
    free = system.f_bavail * system.f_frsize + taken
    if num_workers * parse_bytes(disk.size, f"{DISK_KEY}.size") > free:
        there = f"{human_bytes(free)} is free in {folder}"
        raise ConfigError(
            f"{DISK_KEY}.size", f"{_each(disk.size, num_workers)}, but {there}: {_at_most(free, num_workers)}"
        )


def check_least(engine: EngineConfig, files: ModelFiles, block: SlabLayout) -> None:
    """`block`: one KV block of a rank. Raises ConfigError for what has no room for a block, or for any request."""
    one = f"one KV block of {files.name}, {block.nbytes} bytes"
    if not is_auto(engine.kv_memory):
        kv, wanted = parse_bytes(engine.kv_memory, KV_KEY), engine.max_model_len or LEAST_TOKENS
        least = -(-min(files.max_position, wanted) // block.block_size) * block.nbytes
        if kv < block.nbytes:
            raise ConfigError(KV_KEY, f"{engine.kv_memory} is less than {one}; auto takes what is right here")
        if kv < least:
            holds = f"{engine.kv_memory} holds a request of {kv // block.nbytes * block.block_size} tokens"
            why = f"engine.max_model_len, {wanted}, takes" if engine.max_model_len else f"{wanted} tokens take"
            raise ConfigError(KV_KEY, f"{holds}, and {why} {-(-least // 2**20)}MiB: set that or more, or auto")
    if 0 < _bytes(engine.host_kv_memory, HOST_KEY) < block.nbytes:
        raise ConfigError(HOST_KEY, f"{engine.host_kv_memory} is less than {one}: 0 turns it off")
    least = slot_bytes(block.nbytes, block.block_size, engine.tensor_parallel)
    if engine.disk_kv.folder is not None and parse_bytes(engine.disk_kv.size, f"{DISK_KEY}.size") < least:
        raise ConfigError(f"{DISK_KEY}.size", f"{engine.disk_kv.size} has no room for {one}")


def is_auto(size: str) -> bool:
    return size.strip() == "auto"


def _workers(config: ServingConfig) -> list[tuple[EngineConfig, WorkerEngine, int]]:
    """The workers that a service starts with, by role and engine."""
    engines = {PREFILL: for_prefill_worker(config).engine, DECODE: config.engine}
    return [
        (engine, kind, count)
        for role, engine in engines.items()
        for kind, count in config.workers.by_engine(role).items()
    ]


def _bytes(size: str, key: str) -> int:
    """0 for auto, which takes no more than is free."""
    return 0 if is_auto(size) else parse_bytes(size, key)


def _each(size: str, count: int, taker: str = "worker") -> str:
    if count == 1:
        return f"{size.strip()} for one {taker}"
    return f"{size.strip()} for each of {count} {taker}s makes {human_bytes(count * parse_bytes(size, ''))}"


def _at_most(free: int, count: int) -> str:
    """A size as a configuration takes it, rounded down."""
    mib = max(0, free) // max(1, count) // 2**20
    size = f"{mib * 10 // 1024 / 10}GiB" if mib >= 2048 else f"{mib}MiB"
    return f"{size}{' each' if count > 1 else ''} at most"
