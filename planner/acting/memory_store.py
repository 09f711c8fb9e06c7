"""What outlives a planner, in a NATS key-value bucket: its memory, and what an operator has set by hand.

Read when a planner starts, written after each decision. While NATS is away nothing is written, and nothing decided
either; the next write brings all.
"""

import asyncio
from typing import Final

import structlog

from runtime.nats.bucket import bucket_config
from runtime.nats.client import NATS_ERRORS, NatsClient
from runtime.nats.subjects import planner_key, planner_stream

RETRY_S: Final = 0.5

log = structlog.get_logger()


class MemoryStore:
    """Of one namespace: `key` is "memory" or "hand"."""

    def __init__(self, nats: NatsClient) -> None:
        self._nats = nats
        self._exists = False
        self._config = bucket_config(planner_stream(nats.namespace), planner_key(nats.namespace, ">"))

    async def load(self, key: str) -> bytes | None:
        """What was saved last, None when nothing was. Waits for NATS: a planner that does not know what the one before
        it has begun must not begin."""
        while True:
            try:
                await self._nats.ensure_stream(self._config)
                stored = await self._nats.stored_message(
                    self._config.name or "", planner_key(self._nats.namespace, key)
                )
                return stored.data if stored is not None else None
            except NATS_ERRORS as error:
                log.warning("planner's memory cannot be read; waiting for NATS", error=str(error) or repr(error))
                await asyncio.sleep(RETRY_S)

    async def save(self, key: str, data: bytes) -> bool:
        """Raises nothing. False when NATS did not take it."""
        try:
            if not self._exists:
                await self._nats.ensure_stream(self._config)
                self._exists = True
            await self._nats.publish_stored(planner_key(self._nats.namespace, key), data)
        except NATS_ERRORS as error:
            self._exists = False  # the server may come back without its storage
            log.warning("planner's memory not saved", key=key, error=str(error) or repr(error))
            return False
        return True
