"""One process of the service: its command, its lives, and what strikes it at the moment."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from runtime.processes.launch import launch_command
from tests.chaos.machine.clocks import Clock
from tests.chaos.machine.hosts import HERE, Host

ROOT = Path(__file__).parents[3]
READY_PREFIX = b"BATON_READY "
READY_TIMEOUT_S = 90.0  # many processes may start at once on few cores

Kind = Literal["nats", "supervisor", "router", "prefill", "decode"]


@dataclass(eq=False)
class Member:
    """`command`: a module or a binary, and its arguments. `variables`: of its environment, beside ours.

    Invariant: `struck` names each fault that is in effect; a member with one counts as unable. `expected_end`: a fault
    has told it to end. `may_end`: a fault took what this life needs, so it may give up. `held_down`: it is not started
    again before the fault is over. `retired`: it is not started again.
    """

    name: str
    kind: Kind
    command: Sequence[str]
    log_file: Path
    host: Host = HERE
    variables: Mapping[str, str] = field(default_factory=dict)
    clock: Clock | None = None
    ready_timeout_s: float = READY_TIMEOUT_S
    python: Path | None = None  # another interpreter than ours
    addresses: dict[str, str] = field(default_factory=dict)
    struck: list[str] = field(default_factory=list)
    expected_end: bool = False
    may_end: bool = False
    held_down: bool = False
    retired: bool = False
    lives: int = 0
    started_s: float = 0.0  # time of day
    process: asyncio.subprocess.Process | None = None
    _drain: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} was never started"
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    @property
    def ready(self) -> bool:
        return self.alive and bool(self.addresses)

    async def start(self) -> None:
        """Returns when the process serves. Raises RuntimeError when it ends first, TimeoutError when it is too slow."""
        self.addresses, self.expected_end, self.may_end, self.lives = {}, False, False, self.lives + 1
        self.started_s = time.time()
        path = os.pathsep.join((str(ROOT), str(ROOT / "proto"), *sys.path))
        with self.log_file.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.host.prefix,
                *launch_command(self.command[0], self.python),
                *self.command[1:],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **self.host.variables, **self.variables},
                start_new_session=True,
            )
        try:
            self.addresses = await asyncio.wait_for(self._until_ready(self.process), self.ready_timeout_s)
        except BaseException:
            self.expected_end = True
            await self.kill()
            raise

    async def ended(self) -> int:
        """Waits for the end of this life; returns its exit code."""
        assert self.process is not None
        return await self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        if self.process is not None:
            await self.process.wait()

    async def stop(self, timeout_s: float) -> bool:
        """Ends it. False when it did not end by itself with code 0."""
        self.expected_end = True
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self.ended(), timeout_s) == 0
        except TimeoutError:
            await self.kill()
            return False

    def pids(self) -> list[int]:
        """The pids of the process and of the ranks that it has started."""
        try:
            return [self.pid, *(child.pid for child in psutil.Process(self.pid).children(recursive=True))]
        except psutil.NoSuchProcess:
            return [self.pid]

    async def _until_ready(self, process: asyncio.subprocess.Process) -> dict[str, str]:
        if self.kind == "nats":
            host, port = self.command[self.command.index("--addr") + 1], self.command[self.command.index("--port") + 1]
            while process.returncode is None:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection(host, int(port))
                    writer.close()
                    return {"nats": f"{host}:{port}"}
                await asyncio.sleep(0.02)
            raise RuntimeError(f"nats ended with {process.returncode}; see {self.log_file}")
        assert process.stdout is not None
        async for line in process.stdout:
            if line.startswith(READY_PREFIX):
                self._drain = asyncio.create_task(_read_on(process.stdout))
                addresses: dict[str, str] = json.loads(line.removeprefix(READY_PREFIX))["addresses"]
                return addresses
        code, lines = await process.wait(), self.log_file.read_text(errors="replace").splitlines()
        raise RuntimeError(f"{self.name} ended with {code} before it was ready: " + " | ".join(lines[-3:]))


async def _read_on(stream: asyncio.StreamReader) -> None:
    """Lest the pipe fills up."""
    while await stream.read(65536):
        pass
