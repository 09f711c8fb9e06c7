"""What a supervisor asks of the place where its processes run: this machine, or a Ray cluster."""

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from baton_proto.planner import Role
from baton_proto.rollout import Code
from runtime.checkpoint.served_model import is_mock
from runtime.config.serving import ServingConfig
from runtime.processes.process import Process

ROUTER = "router"  # the module
NATS = "nats"  # the module, and the name where there is one server


class Former(Struct, frozen=True):
    """What a service was before its last roll-out."""

    config: ServingConfig
    code: Code | None


class Generation(Struct, frozen=True):
    """Processes that belong together: a roll-out replaces those of one generation by those of the next."""

    number: int = 1
    code: Code | None = None  # None: the installation that the supervisor runs from
    weights: dict[str, str] = {}  # of each model's files, by namespace; empty: as when the supervisor started
    before: Former | None = None


class Launch(Struct, frozen=True):
    """One process to be started, on whichever machine."""

    name: str
    module: str  # the Python module to run; NATS: the server's binary
    config: ServingConfig  # with the NATS URL; the launcher adds what follows from the place
    arguments: list[str] = []  # in addition to --config
    workers: dict[str, Role] = {}  # those that live in it, by id
    ranks: int = 0  # GPUs that the process takes; where there are no GPUs, shares of the cores
    keys: dict[str, str] = {}  # secret variables of its environment
    addresses: dict[str, str] = {}  # where one that it replaces was to be reached: it takes the same ports
    generation: Generation = Generation()
    routes: dict[str, str] = {}  # HOST:PORT where each NATS server of a cluster listens for the others, by name

    def __repr__(self) -> str:
        return f"Launch({self.name})"


class Machines(Struct, frozen=True):
    """What all workers together may use."""

    gpus: int
    cores: int


class Launcher(Protocol):
    @property
    def machines(self) -> Machines: ...

    @property
    def on_ray(self) -> bool: ...

    @property
    def log_dir(self) -> Path | None:
        """The folder of logs on this machine; None: logs go elsewhere."""

    def here(self, config: ServingConfig) -> ServingConfig:
        """The configuration for what runs in the supervisor's own process: with the address to listen on."""

    async def route(self, others: Collection[str], before: str = "") -> str:
        """HOST:PORT for one more NATS server, which joins those at `others`: where it was `before` while that machine
        is there, or else on the machine that has the fewest of them."""

    def process(self, launch: Launch) -> Process:
        """A process that is not started yet."""

    def place(self, process: Process) -> Collection[str]:
        """The GPUs that a process has which lives, by name; empty where it has none, or nobody here knows them."""

    async def has_room(self, launch: Launch) -> bool:
        """Whether one more worker finds room beside those that live, without a wait for a machine to be started."""

    def release(self, process: Process) -> None:
        """Frees what a process held that has ended."""

    def renew(self, config: ServingConfig) -> None:
        """What processes read again while they run is as `config` says from now on, once their logs are opened
        anew."""

    async def living(self) -> list[tuple[Launch, Process]]:
        """The processes that an earlier supervisor of the same service has left, ready or not."""

    def close(self) -> None:
        """Frees what is left when all processes have ended."""


def uses_gpus(config: ServingConfig, machines: Machines) -> bool:
    """Whether each worker takes GPUs of its own. A cluster may get its GPUs later: `engine.device: cuda` tells."""
    device = config.engine.device
    return not is_mock(config) and (device == "cuda" or (device == "auto" and machines.gpus > 0))
