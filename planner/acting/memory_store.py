"""The state that outlives a planner, in a NATS key-value bucket: its memory, and the counts set by hand.

A planner reads the state when it starts and writes its memory after each decision. Because each write holds the
whole memory, the next one makes up for a write that failed.
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
    """The bucket of one namespace. `key` is "memory" or "hand"."""

    def __init__(self, nats: NatsClient) -> None:
        self._nats = nats
        self._exists = False
        self._config = bucket_config(planner_stream(nats.namespace), planner_key(nats.namespace, ">"))

    async def load(self, key: str) -> bytes | None:
        """The value saved last, None when nothing was saved. Waits until NATS answers, because a planner may not start
        before it knows which effects the last planner has begun."""
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
        """Returns False when NATS did not store the value. Never raises NATS_ERRORS."""
        try:
            if not self._exists:
                await self._nats.ensure_stream(self._config)
                self._exists = True
            await self._nats.publish_stored(planner_key(self._nats.namespace, key), data)
        except NATS_ERRORS as error:
            self._exists = False  # the server may restart without its storage
            log.warning("planner's memory not saved", key=key, error=str(error) or repr(error))
            return False
        return True
