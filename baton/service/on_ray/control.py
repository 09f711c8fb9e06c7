"""The actor that owns a service on a Ray cluster: it starts NATS, router and workers, runs the planner, and ends all.

It is detached and lives on the head node. When it dies, the processes of the service go on, and the next control actor
takes them over.
"""

import asyncio
from typing import Any

import structlog
from msgspec import Struct

from baton.service.on_ray.launcher import RayLauncher
from baton.service.on_ray.node_logs import show_own_log
from baton.service.service_run import ServiceRun
from baton_proto.rollout import News
from runtime.config.serving import ServingConfig
from runtime.errors import BatonError
from runtime.processes.process import ProcessFailedError
from runtime.telemetry.logging import configure_logging

log = structlog.get_logger()


class State(Struct, frozen=True):
    news: list[News]  # without those that the asker has seen
    over: bool
    error: BatonError | None  # why the service did not come up


class Control:
    def __init__(self, config: ServingConfig, keys: dict[str, str], options: dict[str, Any]) -> None:
        """`keys`: the secret variables of the process that brings the service up. `options`: what it was given beside a
        file."""
        configure_logging(config.logging, "control")
        show_own_log("control")
        self._run = ServiceRun(config, RayLauncher(config), self._tell, keys, options)
        self._running: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._news: list[News] = []
        self._over = False
        self._error: BatonError | None = None

    async def start(self) -> None:
        """Returns at once; `state` tells how the start goes on."""
        self._running = asyncio.create_task(self._serve())

    async def state(self) -> State:
        return self._state(0)

    async def next_state(self, seen: int) -> State:
        """Returns when there are more than `seen` news, or the service is over."""
        while len(self._news) <= seen and not self._over:
            self._changed.clear()
            await self._changed.wait()
        return self._state(seen)

    async def stop(self) -> None:
        """Begins to drain; `state` tells how far the drain is."""
        self._run.stop.set()

    async def _serve(self) -> None:
        try:
            await self._run.run()
        except BatonError as error:
            log.error("the service ended", error=str(error))
            self._error = error
        except Exception as fault:  # our own fault: whoever waits for the service must hear of it
            log.exception("the control actor failed")
            self._error = ProcessFailedError("baton-control", f"failed: {fault!r}")
        finally:
            self._over = True
            self._changed.set()

    def _state(self, seen: int) -> State:
        return State(self._news[seen:], self._over, self._error)

    def _tell(self, line: str, *, event: str, **fields: Any) -> None:
        log.info(line)
        self._news.append(News(line, event, fields))
        self._changed.set()
