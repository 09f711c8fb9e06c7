"""How a router ends: it leaves its ports to a router that stays, or serves on for the drain window where none does."""

import asyncio
from collections.abc import Sequence
from typing import Final

import structlog

from router.api.http.server import HttpServer
from router.api.serving.grpc_api import GrpcApi
from router.requests.generation import Generator
from router.siblings import Siblings
from runtime.config.serving import ServingConfig

QUESTION: Final = "stays"
LAST_REQUEST_S: Final = 1.0  # for who has connected already, and is about to ask; then idle connections are closed

log = structlog.get_logger()


class Leaving:
    """`address`: HOST:PORT of the HTTP API, which routers share that can replace each other."""

    def __init__(self, config: ServingConfig, address: str, siblings: Siblings) -> None:
        self._config = config
        self._address = address.encode()
        self._siblings = siblings
        self._has_begun = False

    async def start(self) -> None:
        """To be called when this router serves. Invariant: of routers that end together, the last one that hears of it
        finds none that stays, because a router says that it leaves before it asks the others."""

        async def answer(address: bytes) -> bytes:
            return b"" if self._has_begun or address != self._address else self._address

        await self._siblings.answer(QUESTION, answer)

    async def drain(self, generators: Sequence[Generator], grpc_api: GrpcApi, http_server: HttpServer) -> None:
        """Returns when no request is in flight, or the time is up."""
        self._has_begun = True
        limit_s = self._config.workers.drain_timeout_s
        for generator in generators:
            generator.leave()
        if await self._siblings.ask(QUESTION, self._address):
            log.info("draining", others="take what comes")
            grpc_api.hand_over(limit_s)
            http_server.hand_over()
            await asyncio.sleep(LAST_REQUEST_S)
            http_server.let_go()
        else:
            window_s = self._config.router.drain_window_s
            log.info("draining", window_s=window_s)
            http_server.leave()
            await asyncio.sleep(window_s)
        remaining = sum(await asyncio.gather(*(generator.drain(limit_s) for generator in generators)))
        if remaining:
            log.warning("drain timeout: requests cut off", remaining=remaining)
            for generator in generators:
                generator.cut_off()
