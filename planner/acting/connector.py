"""The interface between the planner and the runner of the workers: a supervisor of child processes or Ray actors, or
the simulator.

A verb returns when its effect is complete and raises ConnectorError when the effect is impossible. The planner cancels
a verb at its deadline. Invariant: a verb asked twice has the effect of one: `add` of a worker that runs or starts waits
until that worker is ready, `drain` of a worker that is gone returns.
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
    """A worker process as its supervisor knows it, whether discovery lists the worker or not."""

    worker_id: str
    role: Role  # during a flip, the old role
    since_s: float  # Unix time at which it was started
    leaving: Verb | None = None  # the verb in flight that takes this worker away, whichever planner asked for it


class Connector(Protocol):
    @property
    def verbs(self) -> tuple[Verb, ...]:
        """The verbs that this connector can carry out. The planner asks for no others."""

    async def add(self, worker_id: str, role: Role) -> None:
        """Starts a worker and returns when it is ready."""

    async def remove(self, worker_id: str) -> None:
        """Ends a worker that serves nobody, without draining it."""

    async def drain(self, worker_id: str) -> None:
        """Takes the worker off the routers, waits until no request and no push is in flight, and ends the process."""

    async def sleep(self, worker_id: str) -> None:
        """Drains the worker and keeps its process, without its weights in GPU memory."""

    async def wake(self, worker_id: str) -> None:
        """Returns when the sleeping worker is ready again."""

    async def flip(self, worker_id: str, role: Role) -> None:
        """Drains the worker and returns when it is ready in the role `role`."""


class LiveConnector(Connector, Protocol):
    """A connector of real processes, unlike the simulator's."""

    def processes(self) -> Iterable[WorkerProcess]:
        """The processes that live now, including those that still start."""

    async def close(self) -> None:
        """Cancels the verbs in flight. Processes stay as they are."""
