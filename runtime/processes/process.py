"""A process of the service as whoever started it sees it: its readiness, its end, and how it is told to end.

`ChildProcess` and `NatsServer` are processes of this machine; `RayProcess` is one that a Ray actor has started.
"""

import asyncio
import signal
from abc import ABC, abstractmethod
from dataclasses import dataclass

import msgspec

from runtime.errors import BatonError


class Ready(msgspec.Struct, frozen=True):
    """What a process prints on stdout, as JSON after BATON_READY, when it serves."""

    process: str  # "nats" | "router" | "prefill_worker" | "decode_worker"
    id: str
    pid: int
    addresses: dict[str, str] = {}  # such as grpc: "127.0.0.1:8001"


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """A process that ended. `returncode` is negative when a signal ended it, None when it is not known."""

    name: str
    pid: int
    returncode: int | None
    log_tail: str = ""

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}) {how_it_ended(self.returncode)}"


class ProcessFailedError(BatonError):
    """A process did not become ready. Carries what it logged last, when its log goes to a file."""

    def __init__(self, name: str, problem: str, log_tail: str = "") -> None:
        self.name = name
        self.problem = problem
        self.log_tail = log_tail
        super().__init__(f"{name} {problem}" + (f"; its last log lines:\n{log_tail}" if log_tail else ""))


class Process(ABC):
    name: str
    stopping = False  # its end is expected

    @abstractmethod
    async def start(self) -> None:
        """Raises BatonError, and then it has ended."""

    @property
    @abstractmethod
    def alive(self) -> bool: ...

    @property
    @abstractmethod
    def was_ready(self) -> bool: ...

    @property
    @abstractmethod
    def pid(self) -> int:
        """On its machine; 0 before it was started."""

    @abstractmethod
    async def wait_ready(self, timeout_s: float) -> Ready:
        """Raises ProcessFailedError when it exits first or the time is up."""

    @abstractmethod
    async def wait(self) -> ProcessExit:
        """Until it has ended."""

    @abstractmethod
    def send_signal(self, number: signal.Signals) -> None:
        """Nothing happens when it has ended."""

    async def stop(self, timeout_s: float) -> bool:
        """SIGTERM, and SIGKILL when it has not ended by then. False when it did not end by itself, with code 0."""
        self.stopping = True
        if not self.alive:
            return True
        self.send_signal(signal.SIGTERM)
        try:
            ended = await asyncio.wait_for(self.wait(), timeout_s)
        except TimeoutError:
            await self.kill()
            return False
        return ended.returncode == 0

    async def kill(self) -> None:
        self.stopping = True
        self.send_signal(signal.SIGKILL)
        await self.wait()


def how_it_ended(returncode: int | None) -> str:
    """As in ProcessExit, in words that follow its name."""
    if returncode is None:
        return "has ended"
    return f"was ended by {_signal_name(-returncode)}" if returncode < 0 else f"exited with code {returncode}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
