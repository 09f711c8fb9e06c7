"""A process of the service, seen by the process that started it: its readiness, its end, and how it is told to end."""

import asyncio
import signal
from abc import ABC, abstractmethod
from dataclasses import dataclass

import msgspec

from runtime.errors import BatonError


class Ready(msgspec.Struct, frozen=True):
    """The readiness line of a process: what it prints on stdout, as JSON after BATON_READY, when it serves."""

    process: str  # "nats" | "router" | "prefill_worker" | "decode_worker" | "workers"
    id: str
    pid: int
    addresses: dict[str, str] = {}  # such as grpc: "127.0.0.1:8001"
    problem: str = ""  # why it does not serve yet, though it may later on
    comes: bool = False  # with a problem: what is missing has not been there yet, and may only be slow


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """The end of a process. `returncode` is negative when a signal ended it, None when it is not known."""

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
        """Raises BatonError; then the process has ended."""

    @property
    @abstractmethod
    def alive(self) -> bool: ...

    @property
    @abstractmethod
    def was_ready(self) -> bool: ...

    @property
    @abstractmethod
    def pid(self) -> int:
        """The pid on the machine of the process; 0 before its start."""

    @abstractmethod
    async def wait_ready(self, timeout_s: float) -> Ready:
        """Raises ProcessFailedError when the process ends first or the time is up."""

    @abstractmethod
    async def wait(self) -> ProcessExit:
        """Returns when the process has ended."""

    @abstractmethod
    def send_signal(self, number: signal.Signals) -> None:
        """Does nothing when the process has ended."""

    def reopen_log(self) -> None:
        """Its log goes to the file that has the log's name now. Called while it is ready."""
        self.send_signal(signal.SIGHUP)

    async def stop(self, timeout_s: float) -> bool:
        """SIGTERM, and SIGKILL when the process lives after `timeout_s`. True when it ended by itself, with code 0."""
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
    """How a process ended: words that follow its name."""
    if returncode is None:
        return "has ended"
    return f"was ended by {_signal_name(-returncode)}" if returncode < 0 else f"exited with code {returncode}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
