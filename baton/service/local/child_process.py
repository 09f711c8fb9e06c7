"""A process of Baton that this process has started: its start, its readiness line, its last words and its end. It never
outlives this process, however this one ends."""

import asyncio
import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

import msgspec
import structlog

from baton.service.local.local_process import LocalProcess
from baton.service.local.own_log import opened_log
from baton.service.logs.log_file import log_tail
from runtime.end_task import end_tasks
from runtime.processes.launch import launch_command
from runtime.processes.process import ProcessExit, ProcessFailedError, Ready
from runtime.processes.serving import BEAT, BEAT_S, BEATS_VARIABLE, LOG_VARIABLE, STDOUT, read_ready
from runtime.silence import Silence
from runtime.sparing import Sparing

LOG_TAIL_LINES = 20
STDOUT_LIMIT_BYTES = 1024 * 1024  # of one line
SILENT_S: Final = 5.0  # without a beat, in which the process had a core or slept: then it hangs

log = structlog.get_logger()
spare = Sparing(lines=1)


class ChildProcess(LocalProcess):
    """Starts `python -m MODULE ARGUMENTS`. stderr goes to `log_file`, or to our own stderr when that is None. One that
    has begun to beat and hangs is killed.

    Invariant: it is started from the main thread's event loop, because the kernel ends a child when the *thread* that
    started it ends.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log_file: Path | None,
        python: Path | None = None,
    ) -> None:
        self.name = name
        self.command = [*launch_command(module, python), *arguments]
        self._environment = {**environment, BEATS_VARIABLE: "1"}
        self._environment |= {} if log_file is None else {LOG_VARIABLE: str(log_file.absolute())}
        self._log_file = log_file
        self._ready: asyncio.Future[Ready] | None = None

    async def start(self) -> None:
        with _stderr_target(self._log_file) as stderr:
            self._process = await self._spawned(stderr)
        self._ready = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read_stdout(self._process, self._ready))

    async def _spawned(self, stderr: IO[bytes] | None) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env=self._environment,
            limit=STDOUT_LIMIT_BYTES,
            start_new_session=True,  # Ctrl-C in a terminal is for us; we end the children in order
        )

    @property
    def was_ready(self) -> bool:
        return self._ready is not None and self._ready.done() and self._ready.exception() is None

    async def wait_ready(self, timeout_s: float) -> Ready:
        assert self._ready is not None, "not started"
        done, _ = await asyncio.wait({self._ready}, timeout=timeout_s)
        if not done:
            raise ProcessFailedError(self.name, f"was not ready within {timeout_s:.0f} s", self.log_tail())
        return self._ready.result()

    def log_tail(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return log_tail(self._log_file, LOG_TAIL_LINES)[0].rstrip("\n") if self._log_file is not None else ""
        return ""

    async def _read_stdout(self, process: asyncio.subprocess.Process, ready: asyncio.Future[Ready]) -> None:
        """Reads until the child closes it. JSON lines go to our stdout, others than the readiness line to stderr."""
        assert process.stdout is not None
        silence, watch = Silence(BEAT_S, SILENT_S, process.pid), None
        async for line in process.stdout:
            if line == BEAT:
                silence.heard()
                watch = watch or asyncio.create_task(self._kill_when_it_hangs(silence))
                continue
            try:
                said = None if ready.done() else read_ready(line)
            except msgspec.DecodeError as error:
                ready.set_exception(ProcessFailedError(self.name, f"says it is ready in a wrong form: {error}"))
                continue
            if said is not None:
                ready.set_result(said)
            elif line.startswith(b"{"):  # of logging.usage
                _pass_on(line)
            else:
                sys.stderr.write(f"{self.name}: {line.decode(errors='replace')}")
        returncode = await process.wait()
        if watch is not None:
            await end_tasks(watch)
        if not ready.done():
            exited = ProcessExit(self.name, process.pid, returncode, self.log_tail())
            ready.set_exception(ProcessFailedError(str(exited), "before it was ready", exited.log_tail))
            ready.exception()  # marks it as seen: perhaps nobody waits for it

    async def _kill_when_it_hangs(self, silence: Silence) -> None:
        """Its end is told as any other one that nobody wanted."""
        await asyncio.sleep(BEAT_S)
        while not silence.look():
            await asyncio.sleep(BEAT_S)
        log.error("a process hangs and is killed", process=self.name, pid=self.pid, silent_s=SILENT_S)
        self.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def _stderr_target(log_file: Path | None) -> Iterator[IO[bytes] | None]:
    """The child has its own copy of the descriptor; ours is closed at once."""
    if log_file is None:
        yield None
        return
    with opened_log(log_file) as stream:
        yield stream


def _pass_on(line: bytes) -> None:
    """A reader that stands still must not stop us: a line that a pipe has no room for is lost."""
    if select.select([], [STDOUT], [], 0)[1]:
        os.write(STDOUT, line)
    else:
        spare(log.warning, "lines of usage are lost", reason="nobody reads our stdout")


def environment(threads: int) -> dict[str, str]:
    """The variables of this process, with the number of threads that numeric libraries may start in the child."""
    # Else gRPC's native code writes a line by itself for each malformed header that a stranger sends.
    return {"GRPC_VERBOSITY": "NONE", **os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
