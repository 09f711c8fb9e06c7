"""A worker alone in its process: one life with an engine of its own, or a life each time that a server elsewhere is
there, each as a new incarnation. A server with several ranks has a worker for each."""

import time
from collections.abc import Callable
from typing import Final

import psutil
import structlog
import uvloop
from msgspec.structs import replace

from baton_proto.discovery import WorkerRecord
from runtime.config.external import rank_names
from runtime.config.serving import ServingConfig, load_config
from runtime.end_task import run_all
from runtime.errors import BatonError, UnavailableError
from runtime.processes.collector import calm_collector
from runtime.processes.serving import StopSignal, print_ready, stop_signal
from runtime.telemetry.logging import configure_logging
from runtime.within import happens
from worker.arguments import parse_arguments
from worker.engines.base import EngineElsewhere
from worker.engines.table import build_worker_engine, engine_elsewhere
from worker.process import announce_ready, serve_worker, shared_parts
from worker.worker import Worker

START_SHARE: Final = 0.8  # of the time that a worker may take from its process's start on, for its engine to appear
RETRY_S: Final = 1.0

log = structlog.get_logger()


def main(build_role: type[Worker], adapted: Callable[[ServingConfig], ServingConfig] = lambda config: config) -> None:
    """The process of one worker. `adapted`: its configuration as the role takes it."""
    arguments = parse_arguments(f"{build_role.name}_worker")
    try:
        config = adapted(load_config(arguments.config))
        configure_logging(config.logging, arguments.worker_id)
        uvloop.run(run_worker(config, arguments.worker_id, build_role))
    except BatonError as error:
        raise SystemExit(f"{arguments.worker_id}: {error}") from None


async def run_worker(config: ServingConfig, worker_id: str, build_role: type[Worker]) -> None:
    """Serves until SIGTERM or SIGINT, then drains. Raises ConfigError, ModelError or UnavailableError."""
    stop = stop_signal()
    external = config.external_worker(worker_id)
    if external is not None:
        await Lives(config, worker_id, build_role, engine_elsewhere(config, external), stop).live_while_there()
        return
    assembly = build_worker_engine(config)
    calm_collector()  # before anybody waits for our heartbeats, because it takes 0.3 s of a core
    async with shared_parts(config, worker_id) as shared:
        await serve_worker(shared, worker_id, build_role, assembly, stop, announce_ready)


class Lives:
    """The lives of the workers of a server that is elsewhere."""

    def __init__(
        self,
        config: ServingConfig,
        worker_id: str,
        build_role: type[Worker],
        engine: EngineElsewhere,
        stop: StopSignal,
    ) -> None:
        self._config = config
        self._worker_id = worker_id
        self._build_role = build_role
        self._engine = engine
        self._stop = stop
        self._has_answered = False  # to whoever has started the process
        self._told = ""  # why there is no engine

    async def live_while_there(self) -> None:
        """Returns after the drain. An engine that is not there, or does not fit, is asked again and again; whoever has
        started the process hears of it, at once when it does not fit, else when the first life is late."""
        calm_collector()
        age_s = time.time() - psutil.Process().create_time()
        late_s = time.monotonic() - age_s + START_SHARE * self._config.workers.ready_timeout_s
        async with self._engine:
            while not self._stop.is_set():
                try:
                    await self._live()
                except BatonError as error:
                    self._tell(str(error))
                    comes = isinstance(error, UnavailableError)
                    if not self._has_answered and not (comes and time.monotonic() < late_s):
                        self._has_answered = True
                        print_ready(f"{self._build_role.name}_worker", self._worker_id, {}, str(error), comes)
                await happens(self._stop, RETRY_S)

    async def _live(self) -> None:
        """Returns after the drain. Raises what says that the engine is not there, or is lost."""
        async with self._engine.life() as engines, shared_parts(self._config, self._worker_id) as shared:
            ready: list[WorkerRecord] = []

            def on_ready(record: WorkerRecord) -> None:
                ready.append(record)
                if len(ready) == len(engines):
                    self._ready(replace(record, worker_id=self._worker_id))

            await run_all(
                serve_worker(shared, name, self._build_role, assembly, self._stop, on_ready)
                for name, assembly in zip(rank_names(self._worker_id, len(engines)), engines, strict=True)
            )

    def _tell(self, reason: str) -> None:
        if reason != self._told:
            self._told = reason
            log.warning("waiting for the engine", worker=self._worker_id, reason=reason)

    def _ready(self, record: WorkerRecord) -> None:
        if not self._has_answered:
            announce_ready(record)
        self._has_answered = True
        self._told = ""
