"""Where the processes of a service run: what the supervisor asks of this machine, or of a Ray cluster."""

from typing import Literal, Protocol

from msgspec import Struct

from runtime.checkpoint.served_model import is_mock
from runtime.config.serving import ServingConfig
from runtime.processes.process import Process

Role = Literal["prefill", "decode"]


class Launch(Struct, frozen=True):
    """One process to be started, wherever that will be."""

    name: str
    module: str  # that Python runs; NATS: the server itself
    config: ServingConfig  # with the NATS URL filled in; the launcher adds what follows from the place
    arguments: list[str] = []  # beside --config
    workers: dict[str, Role] = {}  # that live in it, by id
    ranks: int = 0  # GPUs that it takes where there are any, else shares of the cores
    keys: dict[str, str] = {}  # variables of its environment that nobody else may see

    def __repr__(self) -> str:
        return f"Launch({self.name})"


class Machines(Struct, frozen=True):
    """What all workers may use together."""

    gpus: int
    cores: int


class Launcher(Protocol):
    @property
    def machines(self) -> Machines: ...

    def here(self, config: ServingConfig) -> ServingConfig:
        """As it is for what runs beside the supervisor: with the address to listen on."""

    def process(self, launch: Launch) -> Process:
        """Not started yet."""

    def release(self, process: Process) -> None:
        """It has ended: what it held is free."""

    async def living(self) -> list[tuple[Launch, Process]]:
        """Those that an earlier supervisor of the same service has left behind, ready or not."""

    def close(self) -> None:
        """All have ended."""


def uses_gpus(config: ServingConfig, machines: Machines) -> bool:
    """Whether each worker takes GPUs of its own. On a cluster that has none yet, only `engine.device: cuda` tells."""
    device = config.engine.device
    return not is_mock(config) and (device == "cuda" or (device == "auto" and machines.gpus > 0))
