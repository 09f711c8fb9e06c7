"""How a router ends: it leaves its ports to a router that stays, or serves on for the drain window where none does."""

import asyncio
import time
from collections.abc import Sequence
from typing import Final

import structlog

from router.api.http.server import HttpServer
from router.api.serving.grpc_api import CONNECTION_AGE_S, GrpcApi
from router.requests.generation import Generator
from router.siblings import Siblings
from runtime.config.serving import ServingConfig

QUESTION: Final = "stays"
LAST_REQUEST_S: Final = 1.0  # for who has connected, or has been answered, and is about to ask
YOUNGEST_S: Final = 1.0
TRIES: Final = 4
LOOK_S: Final = 0.25  # between looks whether clients are left

log = structlog.get_logger()


def connection_age_s(drain_timeout_s: float) -> float:
    """At which clients of gRPC connect anew, so that a router that leaves has none well before its time is up."""
    return min(max(drain_timeout_s / 3, YOUNGEST_S), CONNECTION_AGE_S)


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
        if await self._another_stays():
            log.info("draining", others="take what comes")
            limit_s -= await self._hand_over(generators, grpc_api, http_server, limit_s)
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

    async def _hand_over(
        self, generators: Sequence[Generator], grpc_api: GrpcApi, http_server: HttpServer, limit_s: float
    ) -> float:
        """Returns the seconds that it took, at most `limit_s`. It ends early when those who stayed leave, too: then
        nobody is sent elsewhere. Who is answered here until then may ask once more."""
        began_s = time.monotonic()
        await grpc_api.hand_over()
        http_server.hand_over()
        quiet_s = stay_s = 0.0  # since the last look with a request in flight; since the beginning
        while stay_s < limit_s and await self._another_stays():
            http_server.let_go(LAST_REQUEST_S)
            if quiet_s > LAST_REQUEST_S and (stay_s >= grpc_api.longest_stay_s or not await grpc_api.has_clients()):
                break
            await asyncio.sleep(LOOK_S)
            idle = all(generator.is_idle for generator in generators)
            quiet_s = quiet_s + LOOK_S if idle else 0.0
            stay_s = time.monotonic() - began_s
        return min(stay_s, limit_s)

    async def _another_stays(self) -> bool:
        """One that is busy may miss a question."""
        for _ in range(TRIES):
            if await self._siblings.ask(QUESTION, self._address):
                return True
        return False
