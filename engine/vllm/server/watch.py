"""Watches one vLLM server for all of its ranks: is it healthy, what do its metrics say of each, and which adapters does
it have?"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

import structlog

from engine.vllm.server.adapters import ServerAdapters
from engine.vllm.server.gauges import PATH as METRICS, Gauges
from engine.vllm.server.server import RefusedError, VllmServer
from runtime.end_task import end_tasks
from runtime.errors import UnavailableError

POLL_S: Final = 1.0  # between two looks at the server

log = structlog.get_logger()

Told = Callable[[Gauges | None], None]
"""Gets a rank's gauges; None: the server is lost."""


class ServerWatch:
    """A context, within which the server is watched. Event loop only."""

    def __init__(self, server: VllmServer) -> None:
        self.lost: UnavailableError | None = None  # as a whole: vLLM ends when one of its ranks does
        self.adapters = ServerAdapters(server)
        self._server = server
        self._told: dict[int, Told] = {}
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._look_again_and_again())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None, "__aenter__ came before"
        await end_tasks(self._task)

    def tell(self, rank: int, told: Told) -> None:
        """Calls `told` with each look at the server."""
        self._told[rank] = told

    async def look(self) -> dict[int, Gauges]:
        """Reads what the server says; empty: it cannot be read, or the server is lost."""
        try:
            await self._server.ask("/health")
            await self.adapters.look()
            return Gauges.read(await self._server.ask(METRICS))
        except ValueError as error:
            log.warning("metrics or models that cannot be read", server=self._server.address, error=str(error))
        except (UnavailableError, RefusedError) as error:
            self.lost = UnavailableError(str(error) or f"{self._server.address} is not healthy")
            for told in self._told.values():
                told(None)
        return {}

    async def _look_again_and_again(self) -> None:
        while self.lost is None:
            for rank, gauges in (await self.look()).items():
                if told := self._told.get(rank):
                    told(gauges)
            await asyncio.sleep(POLL_S)
