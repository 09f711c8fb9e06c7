"""Carries out actions: one task with a deadline per action. Invariant: a worker has at most one effect in flight."""

import asyncio
from collections.abc import Callable

import structlog
from msgspec.structs import replace

from baton_proto.decoding import MAX_TEXT
from baton_proto.planner import Action, Failure, Observation, WorkerView
from planner.acting.connector import Connector
from planner.journal import EffectEnded
from planner.policy import pace
from runtime.end_task import end_tasks
from runtime.errors import BatonError

log = structlog.get_logger()


class Effects:
    """The effects in flight. `ended` receives each effect when it ends."""

    def __init__(
        self,
        connector: Connector,
        start_s: float,
        clock: Callable[[], float],
        ended: Callable[[EffectEnded], None],
    ) -> None:
        self._connector = connector
        self._clock = clock
        self._ended = ended
        self._deadlines_s = {
            "add": pace.FAILED_STARTS * start_s,
            "wake": pace.WAKE_DEADLINE_S,
            "sleep": pace.SLEEP_DEADLINE_S,
            "flip": pace.FLIP_DEADLINE_S,
            "drain": pace.DRAIN_DEADLINE_S,
            "remove": pace.DRAIN_DEADLINE_S,
        }
        self._running: dict[str, tuple[Action, float, asyncio.Task[None]]] = {}
        self._failures: list[Failure] = []

    def begin(self, actions: list[Action]) -> None:
        for action in actions:
            assert action.worker_id not in self._running, "one effect at a time for one worker"
            task = asyncio.create_task(self._carry_out(action), name=f"{action.verb} {action.worker_id}")
            self._running[action.worker_id] = (action, self._clock(), task)

    @property
    def running(self) -> dict[str, tuple[Action, float]]:
        """The actions in flight by worker id, each with its begin on `clock`."""
        return {worker_id: (action, began_s) for worker_id, (action, began_s, _) in self._running.items()}

    def shown_in(self, observation: Observation) -> Observation:
        """The observation with the effects in flight and the failures since the last call added to it. A worker that
        is being added appears as starting even before discovery or the supervisor lists it."""
        workers = [
            replace(worker, effect=self._running[worker.worker_id][0].verb)
            if worker.worker_id in self._running else worker
            for worker in observation.workers
        ]  # fmt: skip
        known = {worker.worker_id for worker in observation.workers}
        for worker_id, (action, began_s, _) in self._running.items():
            if action.verb == "add" and worker_id not in known:
                workers.append(WorkerView(worker_id, action.role, "starting", began_s, effect="add"))
        failures, self._failures = [*observation.failures, *self._failures], []
        return replace(observation, workers=workers, failures=failures, verbs=self._connector.verbs)

    async def close(self) -> None:
        """Cancels the tasks. The connector may still complete the effects; the next planner will observe the result."""
        await end_tasks(*(task for _, _, task in self._running.values()))

    async def _carry_out(self, action: Action) -> None:
        began_s, error = self._clock(), ""
        deadline_s = self._deadlines_s[action.verb]
        try:
            async with asyncio.timeout(deadline_s):
                await self._call(action)
        except TimeoutError:
            error = f"{action.worker_id} was not done with {action.verb} after {deadline_s:g} s"
        except BatonError as refused:
            error = str(refused)
        except Exception as unexpected:  # an unexpected error of one effect must not end the planner
            log.exception("effect failed", verb=action.verb, worker=action.worker_id)
            error = f"{type(unexpected).__name__}: {unexpected}"
        finally:
            del self._running[action.worker_id]
        if error:
            self._failures.append(Failure(action.verb, action.worker_id, action.role, error[:MAX_TEXT]))
        duration_s = self._clock() - began_s
        log.info(
            "effect ended", verb=action.verb, worker=action.worker_id, duration_s=round(duration_s, 2), error=error
        )
        self._ended(EffectEnded(self._clock(), action.verb, action.worker_id, action.role, began_s, duration_s, error))

    async def _call(self, action: Action) -> None:
        begin = getattr(self._connector, action.verb)  # a verb is the name of a method
        await (begin(action.worker_id, action.role) if action.verb in ("add", "flip") else begin(action.worker_id))
