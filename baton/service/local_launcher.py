"""Processes as children of this one, on this machine: what `baton up` does without Ray."""

import os
import shutil
import tempfile
from functools import cached_property
from pathlib import Path

import msgspec

from baton.service.child_process import ChildProcess, environment
from baton.service.gpu_places import GpuPlaces, visible_gpus
from baton.service.launcher import Launch, Machines
from baton.service.nats_server import NATS, NatsServer
from runtime.config.serving import ServingConfig, dump_config, for_prefill_worker
from runtime.processes.process import Process
from runtime.security.nats_login import find_login


class LocalLauncher:
    """`log_dir`: one file per process; None: all write to our own stderr. Workers share GPUs and cores evenly. Raises
    ConfigError when there are GPUs, but fewer than a worker takes. Use from the main thread only (see ChildProcess)."""

    def __init__(self, config: ServingConfig, log_dir: Path | None = None) -> None:
        prefill = [for_prefill_worker(config).engine.tensor_parallel] * config.workers.prefill
        ranks = prefill + [config.engine.tensor_parallel] * config.workers.decode
        self.machines = this_machine()
        self._log_dir = log_dir
        self._places = GpuPlaces(visible_gpus() if config.engine.device != "cpu" else [], ranks)
        self._taken: dict[Process, dict[str, str]] = {}
        self._threads = config.engine.threads or max(1, self.machines.cores // max(1, sum(ranks)))

    def here(self, config: ServingConfig) -> ServingConfig:
        return config

    def process(self, launch: Launch) -> Process:
        log_file = None
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            log_file = self._log_dir / f"{launch.name}.log"
        if launch.module == NATS:
            store_dir = launch.config.nats.store_dir or self._folder / "nats"
            login = find_login(launch.config.nats, None, launch.keys)
            return NatsServer(store_dir=store_dir, log_file=log_file, login=login)
        place = self._places.next(launch.ranks) if launch.ranks else {}
        variables = environment(self._threads if launch.ranks else 1) | launch.keys | place
        variables |= {"TMPDIR": str(self._folder)}  # what a killed child leaves, `close` removes
        arguments = ["--config", str(self._write_config(launch.config)), *launch.arguments]
        process = ChildProcess(launch.name, launch.module, arguments, variables, log_file)
        self._taken[process] = place
        return process

    def release(self, process: Process) -> None:
        self._places.give_back(self._taken.pop(process, {}))

    async def living(self) -> list[tuple[Launch, Process]]:
        """None: children end with their supervisor."""
        return []

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    @cached_property
    def _folder(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="baton-"))

    def _write_config(self, config: ServingConfig) -> Path:
        """What the children read, the same for all: with threads and share of a GPU filled in."""
        path = self._folder / "serving.yaml"
        share = max(config.engine.gpu_share, self._places.share)
        engine = msgspec.structs.replace(config.engine, threads=self._threads, gpu_share=share)
        path.write_text(dump_config(msgspec.structs.replace(config, engine=engine)))
        return path


def this_machine() -> Machines:
    return Machines(len(visible_gpus()), len(os.sched_getaffinity(0)))
