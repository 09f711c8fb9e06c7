"""All of a router's files and batches: the paths, and the work on them."""

from collections.abc import Collection
from pathlib import Path

from starlette.routing import Route
from starlette.types import ASGIApp

from router.api.batches.endpoints import BatchEndpoints
from router.api.batches.inner_app import InnerApp
from router.batches.batch_run import Asking
from router.batches.batches import Batches
from router.batches.folder import BatchFolder
from router.batches.room import Look, Room
from router.requests.frontend import Models
from runtime.security.bearer_keys import BearerKeys
from runtime.security.callers import ANYONE


class BatchService:
    """`folder` None: there are none, and the paths say so."""

    def __init__(self, models: Models, folder: str | None, keys: BearerKeys | None, look: Look) -> None:
        """Raises ConfigError."""
        self._inner = InnerApp()
        self._batches: Batches | None = None
        lying = None if folder is None else BatchFolder(Path(folder).expanduser())
        if lying is not None:
            caller = (lambda key: ANYONE) if keys is None else keys.named
            ready = models.not_ready
            asking = Asking(self._inner.ask, lambda: ready() is None, caller, Room(look), models.config.max_body_bytes)
            self._batches = Batches(lying, asking)
        self._endpoints = BatchEndpoints(models, lying, self._wake)

    def routes(self) -> list[Route]:
        return self._endpoints.routes()

    def begin(self, app: ASGIApp, paths: Collection[str]) -> None:
        """`app`: what answers at `paths`, behind the keys."""
        self._inner.app = app
        self._endpoints.served = paths

    def start(self) -> None:
        if self._batches is not None:
            self._batches.start()

    async def close(self) -> None:
        """Idempotent."""
        if self._batches is not None:
            await self._batches.close()

    def _wake(self) -> None:
        if self._batches is not None:
            self._batches.wake()
