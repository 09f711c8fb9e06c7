"""The planner of a live service, with its observer, its metrics, its journal and its answers to operators.

Because the planner's memory is in NATS, a planner that restarts after an error or with its process knows which effects
the last one has begun.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from baton_proto.planner import Role
from planner.acting.connector import LiveConnector
from planner.acting.hand import Hand
from planner.acting.memory_store import MemoryStore
from planner.control import Control
from planner.journal import JOURNAL_BYTES, Journal, Line
from planner.loop import PlannerLoop
from planner.metrics import PlannerMetrics
from planner.observing.live_observer import LiveObserver
from planner.planner import Planner
from planner.shared_budget import Member
from runtime.address import with_host
from runtime.config.serving import ServingConfig
from runtime.errors import ConfigError
from runtime.nats.client import NatsClient
from runtime.nats.subjects import planner_subject
from runtime.processes.reached_at import with_announced_workers
from runtime.security.keys import NO_KEYS, Keys, check_reach

KEY: Final = "memory"
RESTART_S: Final = 1.0  # pause between an error and the next planner

log = structlog.get_logger()


class PlannerService:
    """`gpu_budget`: GPUs that the workers may hold together; `gpus_per_worker`: GPUs of one worker of each role. The
    constructor raises ConfigError when the journal cannot be written."""

    def __init__(
        self,
        config: ServingConfig,
        nats: NatsClient,
        connector: LiveConnector,
        gpu_budget: int,
        gpus_per_worker: Mapping[Role, int],
        keys: Keys = NO_KEYS,
        model: str = "",
        shared: Member | None = None,
    ) -> None:
        """`model`: as the ids of its workers have it, where several models are served; `shared` is theirs."""
        check_reach("workers.host", config.workers.host, keys)
        self.held = ""  # why nothing is begun, while somebody else changes the workers
        self._config = with_announced_workers(config)
        self._nats = nats
        self._connector = connector
        self._budget = gpu_budget
        self._gpus_per_worker = gpus_per_worker
        self._store = MemoryStore(nats)
        self._keys = keys
        self._model = model
        self._shared = shared
        self._operators = keys.operator
        self._metrics = PlannerMetrics()
        self._metrics.watch(nats)
        settings = config.planner
        path = None if settings.journal is None else Path(settings.journal)
        self._journal = None if path is None else Journal(path, JOURNAL_BYTES)

    async def run(self, on_ready: Callable[[str], None] = lambda address: None) -> None:
        """Plans until it is cancelled: after an error, the next planner continues with the memory of the last one.
        `on_ready` gets HOST:PORT of the metrics each time that a planner begins to answer operators."""
        workers = self._config.workers
        address = with_host(self._metrics.serve(workers.host, self._keys), workers.reached_at)
        try:
            while True:
                try:
                    await self._plan(address, on_ready)
                except Exception:
                    log.exception("the planner failed; it is started again", after_s=RESTART_S)
                await asyncio.sleep(RESTART_S)
        finally:
            self._metrics.close()
            if self._journal is not None:
                self._journal.close()

    async def _plan(self, metrics_address: str, on_ready: Callable[[str], None]) -> None:
        """Runs one planner until it fails or is cancelled."""
        async with AsyncExitStack() as closing:
            hand = Hand(self._store)
            await hand.load()
            planner = await self._restored()
            observer = LiveObserver(
                self._nats, self._config, self._connector.processes, self._budget, self._gpus_per_worker, hand.holds
            )
            closing.push_async_callback(observer.close)
            await observer.start()
            loop = PlannerLoop(
                self._config.planner,
                planner,
                observer,
                self._connector,
                write=self._write,
                save=partial(self._store.save, KEY),
                held=lambda: self.held,
                shared=self._shared,
            )
            control = Control(loop, hand, metrics_address, self._operators, self._write)
            subscription = await self._nats.answer(planner_subject(self._nats.namespace), control.answer)
            closing.push_async_callback(self._nats.unsubscribe, subscription)
            on_ready(metrics_address)
            await loop.run()

    async def _restored(self) -> Planner:
        planner = self._planner()
        saved = await self._store.load(KEY)
        try:
            if saved:
                planner.restore(saved)
        except ConfigError as error:
            log.warning("what the last planner remembered cannot be used; this one begins anew", error=str(error))
            return self._planner()
        return planner

    def _planner(self) -> Planner:
        return Planner(self._config.planner, self._config.step_times, self._model)

    def _write(self, line: Line) -> None:
        self._metrics.observe(line)
        if self._journal is None:
            return
        try:
            self._journal.write(line)
        except (OSError, ValueError) as error:  # ValueError: a failed rename closed the file
            log.warning("journal not written", error=str(error))
