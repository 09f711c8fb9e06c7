"""Starts real workers as child processes, for tests that drive them over gRPC."""

import asyncio
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from baton_proto.worker import InspectReport, PrefillTarget, SnapshotChunk
from runtime.calls.worker import WorkerClient
from runtime.config.serving import ServingConfig, dump_config
from runtime.processes.launch import launch_command
from runtime.processes.serving import read_ready

READY_TIMEOUT_S = 60.0


@dataclass
class WorkerProcess:
    worker_id: str
    process: subprocess.Popen[str]
    log: Path
    addresses: dict[str, str]
    incarnation: int = 0

    @property
    def target(self) -> PrefillTarget:
        return PrefillTarget(self.worker_id, self.incarnation, self.addresses["stream"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def exit_code(self, timeout_s: float = 30) -> int:
        """Of a worker that was told to leave; it must have nothing to complain about."""
        code = await asyncio.to_thread(self.process.wait, timeout_s)
        assert "Traceback" not in self.log.read_text(), self.log.read_text()
        return code

    @property
    def client(self) -> WorkerClient:
        return WorkerClient(self.worker_id, self.addresses["rpc"])

    async def inspect(self) -> InspectReport:
        async with self.client as client:
            return await client.inspect(timeout_s=60)

    async def snapshot(self) -> list[SnapshotChunk]:
        async with self.client as client:
            return [chunk async for chunk in client.snapshot(timeout_s=60)]

    async def until(self, what: str, holds: Any, timeout_s: float = 45.0) -> InspectReport:
        """Inspects until `holds(report)`; fails with the last report when the time is up."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while True:
            report = await self.inspect()
            if holds(report):
                return report
            assert loop.time() < end, (
                f"{self.worker_id}: not {what} after {timeout_s} s: {report}\n{self.log.read_text()[-4000:]}"
            )
            await asyncio.sleep(0.005)

    async def until_idle(self, timeout_s: float = 45.0) -> InspectReport:
        """Nothing runs, no block is held, all is well."""

        def idle(report: InspectReport) -> bool:
            load = report.load
            return (load.running, load.waiting, load.blocks_used, load.leases) == (0, 0, 0, 0)

        report = await self.until("idle", idle, timeout_s)
        assert report.problems == []
        return report


async def start_worker(role: str, worker_id: str, config: ServingConfig, folder: Path) -> WorkerProcess:
    path = folder / f"{worker_id}.yaml"
    path.write_text(dump_config(config))
    log = folder / f"{worker_id}.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*launch_command(f"{role}_worker"), "--config", str(path), "--worker-id", worker_id],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    worker = WorkerProcess(worker_id, process, log, {})
    try:
        await _wait_ready(worker, f"{role}_worker")
    except BaseException:
        stop(worker)
        raise
    return worker


async def _wait_ready(worker: WorkerProcess, process_name: str) -> None:
    assert worker.process.stdout is not None
    line = await asyncio.wait_for(asyncio.to_thread(worker.process.stdout.readline), READY_TIMEOUT_S)
    ready = read_ready(line.encode())
    assert ready is not None, f"{line!r}\n{worker.log.read_text()[-4000:]}"
    assert (ready.process, ready.id, ready.pid) == (process_name, worker.worker_id, worker.process.pid)
    worker.addresses = ready.addresses
    worker.incarnation = (await worker.inspect()).incarnation


def stop(worker: WorkerProcess) -> None:
    if worker.process.poll() is None:
        worker.kill()
    if worker.process.stdout is not None:
        worker.process.stdout.close()


def prompt(length: int, seed: int) -> list[int]:
    """Random token ids without the special ones."""
    tokens: list[int] = np.random.default_rng(seed).integers(3, 512, length).tolist()
    return tokens
