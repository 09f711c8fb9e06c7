"""What the planner asks of whoever runs processes: child processes, Ray actors, the simulator.

A verb returns when its effect is there, and raises ConnectorError when it cannot be. It may be cancelled, which happens
at its deadline. Asked twice it does no more than asked once: `add` of a worker that is there or starting waits for that
one, `drain` of one that is gone returns.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from baton_proto.planner import Role, Verb
from runtime.errors import BatonError


class ConnectorError(BatonError):
    """A verb that could not be carried out. `reason` is a sentence."""

    def __init__(self, verb: Verb, worker_id: str, reason: str) -> None:
        self.verb = verb
        self.worker_id = worker_id
        self.reason = reason
        super().__init__(f"{verb} {worker_id}: {reason}")


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A worker as whoever runs its process knows it, whether discovery lists it or not."""

    worker_id: str
    role: Role  # while it flips, the one that it had
    since_s: float  # Unix time at which it was started
    leaving: Verb | None = None  # remove, drain or flip, while it is under way, whichever planner has asked for it


class Connector(Protocol):
    @property
    def verbs(self) -> tuple[Verb, ...]:
        """Those that it has. The others are never asked for."""

    async def add(self, worker_id: str, role: Role) -> None:
        """Until it is ready."""

    async def remove(self, worker_id: str) -> None:
        """Ends it at once: it serves nobody."""

    async def drain(self, worker_id: str) -> None:
        """Unrouted first, then nothing in flight and no block outbound, then ended. Until it is gone."""

    async def sleep(self, worker_id: str) -> None:
        """Drained as above, but kept, with its weights out of the GPU's way."""

    async def wake(self, worker_id: str) -> None:
        """Until it is ready again."""

    async def flip(self, worker_id: str, role: Role) -> None:
        """Drained as above, then ready in the role `role`."""


class LiveConnector(Connector, Protocol):
    """Of processes that exist, unlike the simulator's."""

    def processes(self) -> Iterable[WorkerProcess]:
        """That live now, those still starting included."""

    async def close(self) -> None:
        """Lets go of the verbs that are still at work. Processes stay as they are."""
