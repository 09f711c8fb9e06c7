"""The actor that a process of Baton lives in on a Ray cluster.

It starts the process as its child, and is how the supervisor reaches it: ready, signals, end, log. The process is what
it is without Ray, and speaks to the others itself; it ends with the actor, however that ends.
"""

import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import ray

from baton.service.child_process import ChildProcess, environment
from baton.service.launcher import Launch
from baton.service.nats_server import NATS, NatsServer
from baton.service.on_ray.logged_actor import LoggedActor, own_stderr
from runtime.config.serving import ServingConfig, dump_config
from runtime.processes.process import Process, ProcessExit, Ready
from runtime.security.nats_login import find_login

LOOPBACK = "127.0.0.1"


class Hosted(msgspec.Struct, frozen=True):
    """What a supervisor that did not start the process has to know of it."""

    launch: Launch
    pid: int  # 0: not started, or ended
    group: Any | None  # the placement group that the actor holds


class ProcessHost(LoggedActor):
    """An async actor: its event loop is one thread for all its life, which the kernel ties the child to."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._folder = Path(tempfile.mkdtemp(prefix="baton-"))  # what a killed child leaves goes with it
        self.log_file = own_stderr().parent / f"{ray.get_runtime_context().namespace}-{launch.name}.log"
        self._process = self._build()
        self._started = False

    async def start(self) -> int:
        """Its pid. Raises UnavailableError when it is NATS and did not come up."""
        await self._process.start()
        self._started = True
        return self._process.pid

    async def wait_ready(self, timeout_s: float) -> Ready:
        return await self._process.wait_ready(timeout_s)

    async def wait(self) -> ProcessExit:
        ended = await self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        return ended

    async def send_signal(self, number: int) -> None:
        self._process.send_signal(signal.Signals(number))

    async def about(self) -> Hosted:
        alive = self._started and self._process.alive
        return Hosted(self._launch, self._process.pid if alive else 0, ray.util.get_current_placement_group())

    def _build(self) -> Process:
        launch, host = self._launch, ray.util.get_node_ip_address()
        if launch.module == NATS:
            store_dir = launch.config.nats.store_dir or self._folder / "nats"
            login = find_login(launch.config.nats, None, launch.keys)
            return NatsServer(store_dir=store_dir, host=host, log_file=self.log_file, login=login)
        config = on_node(launch.config, host)
        path = self._folder / "serving.yaml"
        path.write_text(dump_config(config))
        variables = environment(config.engine.threads if launch.ranks else 1) | launch.keys
        variables |= {"TMPDIR": str(self._folder)}
        arguments = ["--config", str(path), *launch.arguments]
        return ChildProcess(launch.name, launch.module, arguments, variables, self.log_file)


def on_node(config: ServingConfig, host: str) -> ServingConfig:
    """Workers listen on the address by which the cluster knows their node, unless another one is named."""
    workers = config.workers if config.workers.host != LOOPBACK else msgspec.structs.replace(config.workers, host=host)
    engine = msgspec.structs.replace(config.engine, threads=threads_of(config))
    return msgspec.structs.replace(config, workers=workers, engine=engine)


def threads_of(config: ServingConfig) -> int:
    """Of one rank of a worker."""
    return config.engine.threads or 1
