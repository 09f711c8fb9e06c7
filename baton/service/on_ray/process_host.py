"""The actor that holds one process of Baton on a Ray cluster.

The actor starts the process as its child, and the supervisor reaches the process through it: readiness, signals,
end. The process itself knows nothing of Ray, and ends with the actor, however the actor ends.
"""

import signal

import msgspec
import ray

from baton.service.launcher import Launch
from baton.service.local.build_process import build_process, renew
from baton.service.on_ray.node_logs import log_file
from runtime.config.serving import ServingConfig
from runtime.processes.owned_folder import temporary_folder
from runtime.processes.process import ProcessExit, Ready

LOOPBACK = "127.0.0.1"


class Hosted(msgspec.Struct, frozen=True):
    """What a supervisor has to know of a process that it did not start."""

    launch: Launch
    pid: int  # 0: not started, or ended


class ProcessHost:
    """An async actor: one thread runs its event loop all its life, and the kernel ties the child to this thread."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._folder = temporary_folder()  # holds what a killed child leaves
        host = ray.util.get_node_ip_address()
        config = on_node(launch.config, host)
        self._process = build_process(launch, config, self._folder.path, log_file(launch.name), nats_host=host)
        self._started = False

    async def start(self) -> int:
        """The pid of the process. Raises UnavailableError when NATS did not come up."""
        await self._process.start()
        self._started = True
        return self._process.pid

    async def wait_ready(self, timeout_s: float) -> Ready:
        return await self._process.wait_ready(timeout_s)

    async def wait(self) -> ProcessExit:
        ended = await self._process.wait()
        self._folder.close()
        return ended

    async def send_signal(self, number: int) -> None:
        self._process.send_signal(signal.Signals(number))

    async def renew(self, config: ServingConfig) -> None:
        renew(self._folder.path, config)

    async def about(self) -> Hosted:
        alive = self._started and self._process.alive
        return Hosted(self._launch, self._process.pid if alive else 0)


def on_node(config: ServingConfig, host: str) -> ServingConfig:
    """Workers listen on the address by which the cluster knows their node, unless the configuration names another."""
    workers = config.workers if config.workers.host != LOOPBACK else msgspec.structs.replace(config.workers, host=host)
    engine = msgspec.structs.replace(config.engine, threads=threads_of(config))
    return msgspec.structs.replace(config, workers=workers, engine=engine)


def threads_of(config: ServingConfig) -> int:
    """CPU threads of one rank of a worker."""
    return config.engine.threads or 1
