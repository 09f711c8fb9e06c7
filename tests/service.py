"""A real service for tests: NATS, router and workers as processes of their own, through the Supervisor of `baton up`.

    async with running_service(tiny_model, decode=2, engine={"block_size": 32}) as service:
        answer = await service.client.generate(request)
        service.kill(service.workers("prefill")[0])

Keywords beside the counts are sections of serving.yaml. Every port is 0 unless the test says otherwise. When the
context ends, the service is drained, and a process that is left over fails the test.
"""

import contextlib
import functools
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.service.launcher import Launcher
from baton.service.local.child_process import ChildProcess
from baton.service.local.nats_server import NatsServer
from baton.service.supervisor import Supervisor
from baton_proto.planner import Role
from runtime.calls.router import Client
from runtime.config.overrides import with_overrides
from runtime.config.serving import ServingConfig
from runtime.nats.client import NatsClient, connect
from tests.freezing import freeze

GONE_TIMEOUT_S = 30.0
DEVICE = os.environ.get("BATON_TEST_DEVICE", "cpu")  # "cuda": the workers' engines run on this host's GPUs
ON_DEVICE = {"device": "cuda", "dtype": "float32", "attention": "triton"} if DEVICE == "cuda" else {"threads": 1}
IS_SHORT_OF_GPUS = DEVICE == "cuda" and len(glob("/dev/nvidia[0-9]*")) < 2
NEEDS_TWO = pytest.mark.skipif(IS_SHORT_OF_GPUS, reason="needs two NVIDIA GPUs")  # where ranks run on GPUs
NCCL = [] if IS_SHORT_OF_GPUS else ["nccl"]  # which takes no GPU twice
TRANSPORTS = ["cuda_ipc", *NCCL, "tcp"] if DEVICE == "cuda" else ["shm", "tcp"]
TEST_DEFAULTS: dict[str, Any] = {
    "router": {"http_port": 0, "grpc_port": 0},
    "workers": {"ready_timeout_s": 100.0, "drain_timeout_s": 10.0},
    "engine": {"kv_memory": "64MiB"} | ON_DEVICE,
}


@dataclass
class Service:
    supervisor: Supervisor
    client: Client
    log_dir: Path
    pids: set[int] = field(default_factory=set)  # every process that ever belonged to it

    @property
    def config(self) -> ServingConfig:
        return self.supervisor.config

    @property
    def grpc_address(self) -> str:
        return self.supervisor.address("grpc")

    @property
    def http_address(self) -> str:
        return self.supervisor.address("http")

    @property
    def http_url(self) -> str:
        return f"http://{self.http_address}"

    @property
    def nats(self) -> NatsServer:
        """To stop and start it again in mid-test."""
        (server,) = self.supervisor.nats.values()
        assert isinstance(server, NatsServer)
        return server

    async def connect_nats(self, name: str) -> NatsClient:
        """As one of the service's own processes."""
        assert self.config.nats.url is not None
        return await connect(self.config.nats.url, name, self.config.namespace, 5, self.supervisor.keys.nats)

    def workers(self, role: Role) -> list[str]:
        """Ids of the workers whose processes live."""
        return self.supervisor.children.workers(role)

    def pid(self, process_id: str) -> int:
        """Of a worker, or of the router."""
        return self.supervisor.children[process_id].pid

    def kill(self, process_id: str, how: signal.Signals = signal.SIGKILL) -> None:
        child = self.supervisor.children[process_id]
        if how is signal.SIGSTOP:
            freeze(child.pid)
        else:
            child.send_signal(how)

    async def start_worker(self, role: Role) -> str:
        """Its id, once it is ready."""
        worker_id = await self.supervisor.add_worker(role)
        self.note_pids()
        return worker_id

    async def stop_worker(self, worker_id: str) -> bool:
        """Drains it; False when it had to be killed."""
        return await self.supervisor.stop_worker(worker_id)

    def log(self, process_id: str) -> str:
        """What the process has logged so far."""
        path = self.log_dir / f"{process_id}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def note_pids(self) -> None:
        own = {child.pid for child in self.supervisor.children.values() if child.pid}
        own |= {server.pid for server in self.supervisor.nats.values() if server.alive}
        for pid in own:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.pids |= {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}


@asynccontextmanager
async def running_service(
    model: str | Path,
    prefill: int = 1,
    decode: int = 1,
    overrides: dict[str, Any] | None = None,
    launcher: Callable[[ServingConfig], Launcher] | None = None,
    **sections: Any,
) -> AsyncIterator[Service]:
    """`overrides` are dicts in the shape of serving.yaml, `sections` the same as keywords. Processes are children of
    this one, or the launcher's."""
    config = with_overrides(ServingConfig(model=str(model)), TEST_DEFAULTS, "test defaults")
    for changes in ({"workers": {"prefill": prefill, "decode": decode}}, overrides or {}, sections):
        config = with_overrides(config, changes, "test")
    with tempfile.TemporaryDirectory(prefix="baton-test-") as folder:
        supervisor = Supervisor(config, log_dir=Path(folder), launcher=launcher(config) if launcher else None)
        service: Service | None = None
        try:
            await supervisor.start()
            async with supervisor.client() as client:
                service = Service(supervisor, client, Path(folder))
                service.note_pids()
                yield service
        except BaseException:
            _show_logs(supervisor)
            raise
        finally:
            if service is not None:
                service.note_pids()
            await supervisor.stop()
            if service is not None:
                assert_gone(service.pids)


class SharedService:
    """A service for several tests of a file, each of which leaves it as it found it.

        @pytest_asyncio.fixture(loop_scope="module", scope="module")
        async def shared(tiny_model: Path) -> AsyncIterator[SharedService]:
            async with SharedService(tiny_model, 1, 1) as shared:
                yield shared

        @pytest.mark.asyncio(loop_scope="module")
        async def test_it(shared: SharedService) -> None:
            async with shared.using() as service: ...

    After a test that fails there, and after end(), the next test gets a new one.
    """

    def __init__(self, *arguments: Any, **sections: Any) -> None:
        """As `running_service`."""
        self._start = functools.partial(running_service, *arguments, **sections)
        self._running: Service | None = None
        self._ends = AsyncExitStack()

    @asynccontextmanager
    async def using(self) -> AsyncIterator[Service]:
        try:
            if self._running is None:
                self._running = await self._ends.enter_async_context(self._start())
            yield self._running
        except BaseException:
            await self.end()  # with the error, which makes it show its logs
            raise

    async def end(self) -> None:
        self._running = None
        await self._ends.__aexit__(*sys.exc_info())

    async def __aenter__(self) -> "SharedService":
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.end()


def assert_gone(pids: Iterable[int], timeout_s: float = GONE_TIMEOUT_S) -> None:
    """Fails when a process is still alive after `timeout_s`. A zombie that its parent has not collected is dead."""
    deadline_s = time.monotonic() + timeout_s
    alive = _alive(pids)
    while alive and time.monotonic() < deadline_s:
        time.sleep(0.02)
        alive = _alive(pids)
    assert not alive, f"processes are left over: {alive}"


def _alive(pids: Iterable[int]) -> dict[int, str]:
    found = {}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                found[pid] = " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
    return found


def _show_logs(supervisor: Supervisor) -> None:
    """pytest shows it below a test that failed."""
    for name, child in supervisor.children.items():
        if isinstance(child, ChildProcess):
            print(f"--- last log lines of {name} ---\n{child.log_tail()}", file=sys.stderr)
