"""Starts the processes of a service as children of this process."""

import os
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path

import msgspec
import structlog

from baton.service.gpu_places import VISIBLE, GpuPlaces, visible_gpus
from baton.service.launcher import Launch, Machines
from baton.service.local.build_process import build_process, renew
from baton.service.local.nats_server import HOST
from baton.service.local.own_log import make_log_folder
from baton.service.logs.log_file import KEPT_BYTES, LONG_BYTES
from baton.service.logs.merged_logs import SUFFIX
from baton.service.logs.short_logs import ShortLogs
from baton.service.logs.shown_logs import ShownLogs
from runtime.address import format_address
from runtime.config.models import models_of, sleeping_namespaces
from runtime.config.serving import ServingConfig, for_prefill_worker
from runtime.own_files import may_be_replaced
from runtime.processes.owned_folder import OwnedFolder, temporary_folder, temporary_parent
from runtime.processes.ports import free_port
from runtime.processes.process import Process

LOGS = "logs"  # a folder beside the run's temporary files

log = structlog.get_logger()


class LocalLauncher:
    """`log_dir`: one file per process; None: in a folder of the run, and shown on our own stderr. Workers share GPUs
    and cores evenly. Raises ConfigError when nobody may write to `log_dir`, or when there are GPUs, but fewer than a
    worker takes. Invariant: the main thread alone uses it (see ChildProcess)."""

    on_ray = False

    def __init__(self, config: ServingConfig, log_dir: Path | None = None) -> None:
        self._sleepers = sleeping_namespaces(config)
        ranks = [(size, model.namespace) for model in models_of(config) for size in _ranks(model)]
        awake = [size for size, namespace in ranks if namespace not in self._sleepers]
        asleep = [one for one in ranks if one[1] in self._sleepers]
        self.machines = this_machine()
        if log_dir is not None:
            make_log_folder(log_dir)
        self._log_dir = log_dir
        self._short: ShortLogs | None = None
        self._shown: ShownLogs | None = None
        self._places = GpuPlaces(visible_gpus() if _may_use_gpus(config) else [], awake, asleep)
        self._taken: dict[Process, tuple[dict[str, str], str]] = {}  # its place, and its model if that sleeps
        self._threads = max(1, self.machines.cores // max(1, sum(size for size, _ in ranks)))

    def here(self, config: ServingConfig) -> ServingConfig:
        return config

    async def route(self, others: Collection[str], before: str = "") -> str:
        while not before or before in others:
            before = format_address(HOST, free_port(HOST))
        return before

    def process(self, launch: Launch) -> Process:
        log_file = self.log_dir / f"{launch.name}{SUFFIX}"
        model = launch.config.namespace if launch.config.namespace in self._sleepers else ""
        place = self._places.next(launch.ranks, model) if launch.ranks else {}
        assert self._short is not None, "log_dir makes it"
        self._short.add(log_file)
        process = build_process(launch, self._here(launch.config), self._folder.path, log_file, place)
        self._taken[process] = place, model
        return process

    def place(self, process: Process) -> Collection[str]:
        place, _ = self._taken.get(process, ({}, ""))
        return [gpu for gpu in place.get(VISIBLE, "").split(",") if gpu]

    async def has_room(self, launch: Launch) -> bool:
        """On CPUs there always is, because their time is shared."""
        return self._places.has_room(launch.ranks)

    def renew(self, config: ServingConfig) -> None:
        renew(self._folder.path, config)

    def release(self, process: Process) -> None:
        self._places.give_back(*self._taken.pop(process, ({}, "")))

    async def living(self) -> list[tuple[Launch, Process]]:
        """An empty list: children end with their supervisor."""
        return []

    def close(self) -> None:
        for logs in (self._shown, self._short):
            if logs is not None:
                logs.close()
        self._folder.close()

    @cached_property
    def log_dir(self) -> Path:
        folder = self._log_dir or self._folder.path / LOGS
        make_log_folder(folder)
        self._short = ShortLogs(LONG_BYTES if self._log_dir is None else KEPT_BYTES)
        if self._log_dir is None:
            self._shown = ShownLogs(folder)
        return folder

    @cached_property
    def _folder(self) -> OwnedFolder:
        if may_be_replaced(parent := temporary_parent()):
            log.warning("others may replace our temporary files: chmod +t, or name another TMPDIR", folder=str(parent))
        return temporary_folder()

    def _here(self, config: ServingConfig) -> ServingConfig:
        """Fills in the threads and the share of a GPU, which are the same for all processes."""
        share = max(config.engine.gpu_share, self._places.share)
        threads = config.engine.threads or self._threads
        return msgspec.structs.replace(
            config, engine=msgspec.structs.replace(config.engine, threads=threads, gpu_share=share)
        )


def _ranks(config: ServingConfig) -> Sequence[int]:
    """Of each worker, in the order of their start."""
    prefill = [for_prefill_worker(config).engine.tensor_parallel] * config.workers.count("prefill")
    return prefill + [config.engine.tensor_parallel] * config.workers.count("decode")


def _may_use_gpus(config: ServingConfig) -> bool:
    return any(model.engine.device != "cpu" for model in models_of(config))


def this_machine() -> Machines:
    return Machines(len(visible_gpus()), len(os.sched_getaffinity(0)))
