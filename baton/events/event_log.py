"""The event stream of a namespace as a log: every worker's batches in the order in which JetStream stored them.

The log is read by position instead of subscribed to, so that nothing is lost or seen twice: neither in an outage nor by
a reader that is slower than the workers.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime

import msgspec
import structlog

from baton_proto.kv_events import KvEventBatch, decode_batch
from runtime.errors import UnavailableError
from runtime.nats.client import NATS_ERRORS, NatsClient
from runtime.nats.library import js_errors
from runtime.nats.subjects import ANY, kv_events_stream, kv_events_subject

BATCHES_PER_READ = 1000
POLL_S = 0.05  # while nothing new is there
RETRY_S = 0.25

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class StoredBatch:
    time_s: float  # Unix time at which JetStream stored it: one clock for all workers
    batch: KvEventBatch


class EventLog:
    def __init__(self, nats: NatsClient, worker_id: str = ANY) -> None:
        self._nats = nats
        self._stream = kv_events_stream(nats.namespace)
        self._subject = kv_events_subject(nats.namespace, worker_id)
        self._position: int | datetime = 1
        self._storage_in_doubt = False
        nats.on_reconnect(self._doubt_storage)

    async def seek(self, start: int | datetime | None) -> None:
        """Chooses where to read from. None: what comes from now on; a time: what was stored since; 1: all that the
        stream holds. Raises NATS_ERRORS."""
        self._position = (await self._sequences()).stop if start is None else start

    async def read(self) -> list[StoredBatch]:
        """The next BATCHES_PER_READ batches; none at the end of the log. Raises NATS_ERRORS."""
        if self._storage_in_doubt:
            await self._check_storage()
        messages = await self._nats.stored_messages(self._stream, self._subject, self._position, BATCHES_PER_READ)
        if messages:
            self._position = messages[-1].sequence + 1
        batches = []
        for message in messages:
            try:
                batches.append(StoredBatch(message.time_s, decode_batch(message.payload)))
            except msgspec.DecodeError as error:
                log.warning("malformed kv event skipped", subject=message.subject, error=str(error))
        return batches

    async def follow(self, timeout_s: float) -> AsyncIterator[list[StoredBatch]]:
        """Yields all further batches, without end; an empty list whenever there is nothing new. Raises UnavailableError
        when NATS stays away for longer than `timeout_s`."""
        loop = asyncio.get_running_loop()
        answered_s = loop.time()
        while True:
            try:
                async with asyncio.timeout_at(answered_s + timeout_s):
                    await self._nats.wait_connected()
                    batches = await self.read()
            except NATS_ERRORS as error:
                if loop.time() >= answered_s + timeout_s:
                    raise UnavailableError(f"NATS has not answered for {timeout_s:g} s") from error
                await asyncio.sleep(RETRY_S)
                continue
            answered_s = loop.time()
            yield batches
            if not batches:
                await asyncio.sleep(POLL_S)
            answered_s = loop.time()  # the reader's own time does not count

    async def _sequences(self) -> range:
        try:
            return await self._nats.stored_sequences(self._stream)
        except js_errors.NotFoundError:
            return range(1, 1)  # no worker has ever published

    async def _check_storage(self) -> None:
        """Begins anew when the server has lost its storage, because it counts from 1 again then."""
        if isinstance(self._position, int) and (await self._sequences()).stop < self._position:
            log.warning("the event stream has begun anew")
            self._position = 1
        self._storage_in_doubt = False

    def _doubt_storage(self) -> None:
        self._storage_in_doubt = True
