"""The planner's verbs on the child processes of `baton up`, by way of its Supervisor.

A verb that was begun goes on when whoever asked for it is cancelled or restarted, and who asks again waits for the same
one: no worker is left half drained because its planner is another one now. The Supervisor's process owns the children;
when it ends, so do they.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

import structlog

from baton.service.supervisor import Supervisor
from baton.service.telling import Tell
from baton_proto.planner import ALL_VERBS, ROLES, Role, Verb
from planner.acting.connector import ConnectorError, WorkerProcess
from planner.policy import pace
from planner.policy.observation import LEAVING
from runtime.end_task import end_tasks
from runtime.errors import BatonError, WorkerLostError
from runtime.processes.process import ProcessFailedError

ENDING: Final[tuple[Verb, ...]] = ("remove", "drain", "flip")
END_S: Final = 5.0  # of a drain's deadline kept for the end of the process

log = structlog.get_logger()


class SupervisorConnector:
    """A drain gives requests in flight its deadline, less what the end takes; those that are left go on elsewhere.
    `namespace`: of the model whose workers these are; None: there is one."""

    verbs = ALL_VERBS

    def __init__(self, supervisor: Supervisor, tell: Tell, namespace: str | None = None) -> None:
        config = supervisor.config
        self._supervisor = supervisor
        self._namespace = namespace
        self._tell = tell
        self._drain_s = max(END_S, pace.DRAIN_DEADLINE_S - config.workers.drain_timeout_s - END_S)
        self._since_s: dict[str, tuple[int, float]] = {}  # worker id -> pid, when it was first seen
        self._flipping: dict[str, Role] = {}  # worker id -> the role that it had
        self._tasks: dict[tuple[Verb, str], asyncio.Task[None]] = {}

    def processes(self) -> list[WorkerProcess]:
        """All workers that live, those between two roles included."""
        workers = self._supervisor.children.workers
        lives = {name: role for role in ROLES for name in workers(role, self._namespace)} | self._flipping
        return [self._process(worker_id, role) for worker_id, role in lives.items()]

    async def add(self, worker_id: str, role: Role) -> None:
        await self._once("add", worker_id, lambda: self._start(worker_id, role))

    async def remove(self, worker_id: str) -> None:
        """Ends a worker; one that is ready drains, because it may have requests after all."""
        await self._once("remove", worker_id, lambda: self._end(worker_id))

    async def drain(self, worker_id: str) -> None:
        await self._once("drain", worker_id, lambda: self._drain(worker_id))

    async def sleep(self, worker_id: str) -> None:
        await self._once("sleep", worker_id, lambda: self._sleep(worker_id))

    async def wake(self, worker_id: str) -> None:
        await self._once("wake", worker_id, lambda: self._wake(worker_id))

    async def flip(self, worker_id: str, role: Role) -> None:
        """A process has one role all its life: drained and ended, then started anew on the GPU that is free now."""
        await self._once("flip", worker_id, lambda: self._flip(worker_id, role))

    async def settled(self) -> None:
        """Returns when each verb that was begun has ended."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def close(self) -> None:
        await end_tasks(*self._tasks.values())

    async def _once(self, verb: Verb, worker_id: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Waits for this verb of this worker, which is begun unless it is under way. Raises ConnectorError."""
        key = verb, worker_id
        task = self._tasks.get(key)
        if task is None:
            if verb in ENDING and self._supervisor.children.living(worker_id) is not None:
                self._tell(f"{worker_id} drains: the planner wants it so", event="drains", id=worker_id)
            task = self._tasks[key] = asyncio.create_task(work(), name=f"{verb} {worker_id}")
            task.add_done_callback(lambda done: self._ended(key, done))
        try:
            await asyncio.shield(task)
        except ProcessFailedError as error:
            raise ConnectorError(verb, worker_id, f"{error.name} {error.problem}") from error
        except BatonError as error:
            raise ConnectorError(verb, worker_id, str(error)) from error

    def _ended(self, key: tuple[Verb, str], task: "asyncio.Task[None]") -> None:
        verb, worker_id = key
        del self._tasks[key]
        if verb == "flip":  # here, not in _flip: it has its new role when it is no longer shown as leaving
            self._flipping.pop(worker_id, None)
        if not task.cancelled() and (error := task.exception()):  # perhaps nobody waits for it any more
            log.info("verb failed", verb=verb, worker=worker_id, error=str(error))

    async def _start(self, worker_id: str, role: Role) -> None:
        if self._supervisor.children.living(worker_id) is None:
            await self._supervisor.add_worker(role, worker_id, self._namespace)
        else:
            await self._supervisor.until_used([worker_id])

    async def _drain(self, worker_id: str) -> None:
        child = self._supervisor.children.living(worker_id)
        if child is not None and child.was_ready and not child.stopping:
            with contextlib.suppress(WorkerLostError):  # then there is nothing left to drain
                async with self._supervisor.worker_client(worker_id) as client:
                    if remaining := (await client.drain(self._drain_s)).remaining:
                        log.warning("drain took too long", worker=worker_id, remaining=remaining)
        await self._end(worker_id)

    async def _sleep(self, worker_id: str) -> None:
        await self._supervisor.sleep(worker_id, self._drain_s)

    async def _wake(self, worker_id: str) -> None:
        async with self._supervisor.worker_client(worker_id) as client:
            await client.wake()
        await self._supervisor.until_used([worker_id])

    async def _end(self, worker_id: str) -> None:
        if not self._supervisor.children.has_started(worker_id):
            raise WorkerLostError(worker_id, "was not started by this service, which cannot end it")
        child = self._supervisor.children.living(worker_id)
        if child is not None and child.was_ready:
            await self._supervisor.stop_worker(worker_id)
        elif child is not None:
            await child.kill()

    async def _flip(self, worker_id: str, role: Role) -> None:
        process = next((one for one in self.processes() if one.worker_id == worker_id), None)
        if process is None:
            raise WorkerLostError(worker_id, "is no process of this service")
        self._flipping[worker_id] = process.role
        await self._drain(worker_id)
        await self._start(worker_id, role)

    def _process(self, worker_id: str, role: Role) -> WorkerProcess:
        child = self._supervisor.children.living(worker_id)
        pid = child.pid if child is not None else 0
        if self._since_s.get(worker_id, (None,))[0] != pid:
            self._since_s[worker_id] = pid, time.time()
        under_way = (verb for verb in LEAVING if (verb, worker_id) in self._tasks)
        return WorkerProcess(worker_id, role, self._since_s[worker_id][1], next(under_way, None))
