"""One run of a service, from its start until it is told to stop or cannot serve any more."""

import asyncio
import math
import os
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import grpc

from baton.service.launcher import Launcher
from baton.service.planning.running_planner import RunningPlanner
from baton.service.rolling.rollouts import Rollouts
from baton.service.sleeping.sleepers import Sleepers
from baton.service.supervisor import Supervisor
from baton.service.telling import Tell
from runtime.config.models import sleeping_namespaces
from runtime.config.serving import ServingConfig
from runtime.config.surroundings import LogLevel
from runtime.end_task import end_tasks
from runtime.errors import UnavailableError
from runtime.processes.process import ProcessExit, ProcessFailedError, Ready

STARTS: Final = 5  # of the only router in a row that come to nothing; then it is given up
AT_ONCE_S: Final = 2.0  # one that ends so soon after its start came to nothing
AGAIN_S: Final = 0.5  # doubled with each start that comes to nothing
LONGEST_AGAIN_S: Final = 30.0
GOES_NOT_ON: Final = "the service cannot go on"


class ServiceRun:
    """`tell` hears what happens. Set `stop` to drain the service, and then `hurry` to end it at once. `options`: part
    of serving.yaml that goes before any file."""

    def __init__(
        self,
        config: ServingConfig,
        launcher: Launcher,
        tell: Tell,
        environ: Mapping[str, str] = os.environ,
        options: Mapping[str, Any] = {},
    ) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self._supervisor = Supervisor(config, on_ready=self._process_ready, launcher=launcher, environ=environ)
        self._tell = tell
        self._sleepers = Sleepers(self._supervisor, tell)
        self._planner = RunningPlanner(self._supervisor, tell, self._sleepers.kept)
        self._rollouts = Rollouts(self._supervisor, self._planner, options, tell)
        self._start_s = time.monotonic()
        self._in_order = True  # no process is lost for good
        self._vain = Counter[str]()  # starts that came to nothing, by name of the process
        self._started_s: dict[str, float] = {}  # the last start of one that has ended since, or lives

    def reopen_logs(self, level: LogLevel | None = None) -> None:
        """All processes go on with logs of their names, and with this level."""
        if level is not None:
            self._supervisor.set_log_level(level)
        self._supervisor.reopen_logs()
        self._tell("logs are opened anew", event="logs")

    async def run(self) -> bool:
        """Returns True when the service ended in order because it was told to. Raises ProcessFailedError when the
        service does not come up, ConfigError or UnavailableError when its planner does not."""
        if not await _unless(self.stop, self._start()):
            return True  # told to stop before the service was up; nothing of it is left
        try:
            async with self._sleepers, self._planner, self._rollouts:
                told = await self._serve()
        finally:
            clean = await self._drain()
        return told and clean

    async def answers(self, timeout_s: float) -> bool:
        """Whether a router answers in time."""
        if not self._supervisor.router_addresses:
            return False
        try:
            async with self._supervisor.client() as client:
                await client.status(timeout_s)
        except grpc.aio.AioRpcError:
            return False
        return True

    async def _start(self) -> bool:
        await self._supervisor.start()
        grpc, http = self._supervisor.address("grpc"), self._supervisor.address("http")
        url = f"{'https' if self._supervisor.speaks_tls else 'http'}://{http}"
        self._tell(
            f"gRPC on {grpc}, OpenAI API on {url}/v1, metrics on {url}/metrics, "
            f"events on {self._supervisor.config.nats.url}",
            event="serving",
            grpc=grpc,
            http=http,
            nats=self._supervisor.config.nats.url,
        )
        return True

    async def _serve(self) -> bool:
        """Returns when the service is told to stop, or cannot serve any more. False when a process was lost for
        good."""
        starting: list[asyncio.Task[None]] = []
        try:
            while ended := await _unless(self.stop, self._supervisor.wait()):
                if self._supervisor.comes_back(ended.name):
                    self._tell_of_loss(ended, "it is started again")
                    starting.append(asyncio.create_task(self._start_again(ended.name)))
                    continue
                namespace = self._supervisor.children.launches[ended.name].config.namespace
                if namespace in sleeping_namespaces(self._supervisor.config):
                    self._tell_of_loss(ended, "it is started again when its model is asked for")
                    continue
                self._in_order = False
                able = self._supervisor.config.planner.enabled or bool(self._supervisor.children.workers("decode"))
                self._tell_of_loss(ended, "the service goes on without it" if able else GOES_NOT_ON, able)
                if not able:
                    break
        finally:
            await end_tasks(*starting)
        return self._in_order

    async def _start_again(self, name: str) -> None:
        """Tries several times, because a port may be taken for a moment. Ends the service when that was in vain and
        nothing is served without the process."""
        if time.monotonic() - self._started_s.pop(name, math.inf) > AT_ONCE_S:
            self._vain[name] = 0
        while self._supervisor.comes_back(name):  # a roll-out may end it meanwhile
            if self._vain[name] >= STARTS and not self._supervisor.stands_in(name):
                self._tell(f"error: {name} was started {STARTS} times; {GOES_NOT_ON}", event="given_up", id=name)
                self._in_order = False
                self.stop.set()
                return
            if self._vain[name]:
                await asyncio.sleep(min(AGAIN_S * 2 ** (self._vain[name] - 1), LONGEST_AGAIN_S))
            self._vain[name] += 1
            try:
                await self._supervisor.start_again(name)
                self._started_s[name] = time.monotonic()
                return
            except (ProcessFailedError, UnavailableError, OSError) as error:  # OSError: as of a full disk
                self._tell(f"error: {error}", event="not_started", id=name)

    async def _drain(self) -> bool:
        self._tell("draining", event="draining")
        stopping = asyncio.create_task(self._supervisor.stop())
        if not await _unless(self.hurry, asyncio.shield(stopping), default=False):
            await self._supervisor.kill()
        clean = await stopping
        self._tell("all processes have ended", event="stopped", clean=clean)
        return clean

    def _process_ready(self, ready: Ready) -> None:
        where = ", ".join(f"{name} {address}" for name, address in ready.addresses.items())
        state = f"does not serve yet: {ready.problem} " if ready.problem else "ready"
        self._tell(
            f"{ready.id:<12} {state} after {time.monotonic() - self._start_s:4.1f} s  pid {ready.pid}  {where}",
            event="away" if ready.problem else "ready",
            process=ready.process,
            id=ready.id,
            pid=ready.pid,
            addresses=ready.addresses,
        )

    def _tell_of_loss(self, ended: ProcessExit, what: str, goes_on: bool = True) -> None:
        self._tell(
            f"error: {ended}; {what}" + (f"; its last log lines:\n{ended.log_tail}" if ended.log_tail else ""),
            event="lost",
            id=ended.name,
            pid=ended.pid,
            returncode=ended.returncode,
            goes_on=goes_on,
        )


async def _unless(event: asyncio.Event, work: Any, default: Any = None) -> Any:
    """The result of `work`, or `default` when the event is set first; then `work` was cancelled and has ended."""
    task = asyncio.ensure_future(work)
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.wait({task})
    return default
