"""The workers of one model: which of them sleep and which have been used, and how they fall asleep and wake."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import structlog

from baton.service.supervisor import SLEEP_LEVEL, Supervisor
from baton_proto.discovery import LoadReport, WorkerRecord
from baton_proto.worker import SleepReport
from runtime.calls.worker import WorkerClient
from runtime.config.model_entry import ModelConfig
from runtime.discovery.directory import Change, Directory
from runtime.discovery.load_board import LoadBoard
from runtime.errors import BatonError, DeadlineError, UnavailableError, WorkerLostError
from runtime.nats.client import NatsClient

KNOWN_S = 5.0  # until discovery says what a worker has answered
DEAD_S = 1.0  # until the end of a process is known whose connection has broken

log = structlog.get_logger()


class ModelWorkers:
    """`nats`: for the namespace of the model."""

    def __init__(self, entry: ModelConfig, nats: NatsClient, supervisor: Supervisor) -> None:
        self.entry = entry
        self._supervisor = supervisor
        self.namespace = nats.namespace
        self.wake_took_s = 0.0  # the last time
        self._directory = Directory(nats)
        self._loads = LoadBoard(nats)
        self._used_s = self._woken_s = time.monotonic()
        self._steps: dict[str, int] = {}  # of each worker, as it has reported them
        self._busy: set[str] = set()  # workers that had requests when they reported last

    async def start(self) -> None:
        self._directory.on_change(self._changed)
        self._loads.on_report(self._reported)
        if self.entry.sleeps:
            await self._loads.start()
        await self._directory.start()

    async def close(self) -> None:
        await self._directory.close()

    @property
    def can_answer(self) -> bool:
        return any(one.role == "decode" and one.state == "ready" for one in self._living)

    @property
    def can_wake(self) -> bool:
        return any(one.role == "decode" and one.state == "sleeping" for one in self._living) or bool(self.lost)

    @property
    def lost(self) -> list[str]:
        """Its workers that have died, which a wake starts again. Empty where the model does not sleep by itself."""
        return self._supervisor.children.lost(self.namespace) if self.entry.sleeps else []

    @property
    def is_awake(self) -> bool:
        """Whether any of its memory is taken."""
        return any(one.state != "sleeping" for one in self._living)

    @property
    def awake_s(self) -> float:
        return time.monotonic() - self._woken_s

    @property
    def idle_s(self) -> float:
        """Seconds since its last request, to a second; 0 while it has some."""
        return 0.0 if self._busy else time.monotonic() - self._used_s

    @property
    def has_served(self) -> bool:
        """Whether it has had requests since it woke."""
        return self._used_s > self._woken_s

    async def wake(self) -> None:
        """Wakes all that sleep, and starts those that have died, of being woken too. Raises BatonError when no decode
        worker is ready then."""
        began_s, some_sleep = time.monotonic(), any(one.state == "sleeping" for one in self._living)
        failed: list[BatonError | OSError | None] = [*await self._wake_each()]
        if some_sleep:
            self.wake_took_s = time.monotonic() - began_s
        failed += await asyncio.gather(*map(self._start, self.lost))
        if not self.can_answer:
            raise UnavailableError("; ".join(map(str, filter(None, failed))) or "its workers are gone")
        self._used_s = self._woken_s = time.monotonic()

    async def sleep(self, drain_s: float) -> None:
        """Drains all that are awake. Raises BatonError when one stays awake; then all are awake again, and as if just
        woken: who tries in vain, tries again later."""
        began_s = time.monotonic()
        if failed := await self._each("ready", "sleeping", lambda client: client.sleep(SLEEP_LEVEL, drain_s)):
            await self._wake_each()
            self._used_s = self._woken_s = time.monotonic()
            self.wake_took_s = max(self.wake_took_s, self._woken_s - began_s)
            raise failed[0]

    async def _start(self, worker_id: str) -> BatonError | OSError | None:
        try:
            await self._supervisor.start_again(worker_id)
        except (BatonError, OSError) as error:  # OSError: as of a full disk
            log.warning("a worker of a model that sleeps is not there again", worker=worker_id, reason=str(error))
            return error
        await self._until_known([worker_id], "ready")
        return None

    async def _wake_each(self) -> Sequence[BatonError]:
        return await self._each("sleeping", "ready", lambda client: client.wake())

    async def _each(
        self, before: str, after: str, ask: Callable[[WorkerClient], Awaitable[SleepReport]]
    ) -> Sequence[BatonError]:
        """Asks all workers in one state to be in another one. Returns what was wrong with those that are not."""
        asked = [one for one in self._living if one.state == before]

        async def one(record: WorkerRecord) -> BatonError | None:
            try:
                async with WorkerClient(record.worker_id, record.rpc_address, self._supervisor.keys.cluster) as client:
                    await ask(client)
            except BatonError as error:
                log.warning("a worker stays as it is", worker=record.worker_id, state=before, reason=str(error))
                if isinstance(error, WorkerLostError):
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._supervisor.children.of_worker(record.worker_id).wait(), DEAD_S)
                return error
            return None

        problems = await asyncio.gather(*map(one, asked))
        done = [record.worker_id for record, problem in zip(asked, problems, strict=True) if problem is None]
        await self._until_known(done, after)
        return [problem for problem in problems if problem is not None]

    @property
    def _living(self) -> list[WorkerRecord]:
        """Without those that have died, which discovery knows for some seconds more."""
        living = self._supervisor.children.living
        return [one for one in self._directory.workers.values() if living(one.worker_id) is not None]

    async def _until_known(self, workers: Sequence[str], state: str) -> None:
        """Waits until discovery, which the next decision goes by, knows the state of the workers that live."""
        try:
            await self._directory.wait_for(
                lambda records: all(records[name].state == state for name in workers if name in records), KNOWN_S
            )
        except DeadlineError:
            log.warning("discovery does not know the state yet", workers=workers, state=state)

    def _reported(self, report: LoadReport) -> None:
        load, name = report.load, report.worker_id
        has_requests = bool(load.running or load.waiting or load.leases)
        (self._busy.add if has_requests else self._busy.discard)(name)
        if has_requests or self._steps.get(name) != load.steps:
            self._used_s = time.monotonic()
        self._steps[name] = load.steps

    def _changed(self, change: Change) -> None:
        if change.kind == "removed":
            self._busy.discard(change.record.worker_id)
            self._steps.pop(change.record.worker_id, None)
