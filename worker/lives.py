"""An external worker from start to end: it is there while its server is, each time as a new incarnation."""

import asyncio
import time

import structlog

from baton_proto.discovery import WorkerRecord
from engine.vllm.server.agreement import Facts, agreed
from engine.vllm.server.core import POLL_S, ServerCore
from engine.vllm.server.server import VllmServer
from runtime.config.external import ExternalWorkerConfig
from runtime.config.serving import ServingConfig
from runtime.errors import BatonError, ConfigError, UnavailableError
from runtime.processes.serving import stop_signal
from worker.engines.external import external_assembly, prepared
from worker.process import RoleFactory, announce_ready, serve_worker, shared_parts

START_SHARE = 0.8  # of the time that a worker's start may take, for its server to appear
RETRY_S = 2.0

log = structlog.get_logger()


async def run_external(config: ServingConfig, external: ExternalWorkerConfig, build_role: RoleFactory) -> None:
    """Serves until SIGTERM or SIGINT, then drains. Raises ConfigError, or UnavailableError when the server is not there
    in time for the first start; later on its absence is waited out."""
    worker = _ExternalWorker(config, external, build_role)
    async with VllmServer(external) as server:
        while not worker.stop.is_set():
            facts = await worker.found(server)
            if facts is not None:
                await worker.live(server, facts)


class _ExternalWorker:
    def __init__(self, config: ServingConfig, external: ExternalWorkerConfig, build_role: RoleFactory) -> None:
        self.stop = stop_signal()
        self._config = config
        self._external = external
        self._build_role = build_role
        self._ours = prepared(config)
        self._was_ready = False
        self._deadline_s = time.monotonic() + START_SHARE * config.workers.ready_timeout_s

    async def found(self, server: VllmServer) -> Facts | None:
        """Waits until the server is there and agrees with us; None: it is time to stop. Raises ConfigError or
        UnavailableError before the worker was ever ready."""
        told = ""
        while not self.stop.is_set():
            try:
                return await agreed(self._config, self._external, self._ours.files, server)
            except (UnavailableError, ConfigError) as error:
                final = isinstance(error, ConfigError) or time.monotonic() >= self._deadline_s
                if final and not self._was_ready:
                    raise
                if str(error) != told:
                    told = str(error)
                    log.warning("waiting for the engine", worker=self._external.name, reason=told)
            await _wait(self.stop, RETRY_S)
        return None

    async def live(self, server: VllmServer, facts: Facts) -> None:
        """Returns when the server is lost, or after the drain."""
        name = self._external.name
        try:
            async with ServerCore(server) as core, shared_parts(self._config, name) as shared:
                assembly = external_assembly(self._config, self._external, self._ours, facts, core)
                await serve_worker(shared, name, self._build_role, assembly, self.stop, self._ready)
        except BatonError as error:
            if not self._was_ready:
                raise
            log.warning("the engine is lost", worker=name, reason=str(error))
            await _wait(self.stop, POLL_S)

    def _ready(self, record: WorkerRecord) -> None:
        if not self._was_ready:
            announce_ready(record)
        self._was_ready = True


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    """Returns early when it is time to stop."""
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return
