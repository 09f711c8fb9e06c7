"""A worker's side of the event plane: KV events of each engine step become one numbered batch in JetStream.

`publish` never blocks and never fails. Batches leave in order, many on their way at a time. A batch that JetStream has
not acknowledged is kept and sent again after an outage; routers ignore a batch that they have seen. When the buffer has
to drop batches, routers notice the hole in the event ids and ask the worker for a snapshot.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import structlog

from baton_proto.kv_events import HASH_BYTES, MAJOR, KvEvent, KvEventBatch, Moved, Removed, Stored, encode_batch
from runtime.end_task import end_tasks
from runtime.nats.client import NATS_ERRORS, NO_STORAGE, NatsClient
from runtime.nats.library import PubAck, StorageType, StreamConfig, nats_errors
from runtime.nats.subjects import kv_events_stream, kv_events_subject
from runtime.within import happens

MAX_AGE_S = 3600.0
MAX_STREAM_BYTES = 256 * 1024 * 1024
BATCH_HASH_BYTES = 512 * 1024  # half of NATS' default limit for a message
FRAME_BYTES = 64  # of an event beside its hashes, at most
BUFFER_BYTES = 64 * 1024 * 1024
WINDOW = 256  # batches on their way to JetStream
ACK_TIMEOUT_S = 2.0
RETRY_S = 0.25
CLOSE_TIMEOUT_S = 1.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Batch:
    event_id: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class _Sent:
    batch: _Batch
    acknowledged: "asyncio.Future[PubAck]"
    since: float  # monotonic


class EventPublisher:
    """Made and used on the event loop."""

    def __init__(
        self,
        nats: NatsClient,
        worker_id: str,
        incarnation: int,
        buffer_bytes: int = BUFFER_BYTES,
        gather_s: float = 0.0,
    ) -> None:
        """A batch leaves at most every `gather_s`, because a message costs each router more than its events do."""
        self._nats = nats
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._subject = kv_events_subject(nats.namespace, worker_id)
        self._stream = stream_config(nats.namespace)
        self._stream_exists = False
        self._buffer_limit = buffer_bytes
        self._gather_s = gather_s
        self._gathered: list[KvEvent] = []
        self._timer: asyncio.TimerHandle | None = None  # packs `_gathered`
        self._not_before_s = 0.0
        self._buffered_bytes = 0  # of waiting and sent batches
        self._waiting: deque[_Batch] = deque()
        self._sent: deque[_Sent] = deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._last_event_id = 0
        self.dropped_batches = 0
        self._failures = 0  # in a row
        nats.on_disconnect(self._disconnected)
        self._task = asyncio.create_task(self._run())

    @property
    def last_event_id(self) -> int:
        """Event id of the newest batch; 0 before the first one."""
        return self._last_event_id

    @property
    def unacknowledged(self) -> int:
        """Batches that JetStream has not confirmed."""
        return len(self._waiting) + len(self._sent)

    def publish(self, events: list[KvEvent]) -> None:
        """Sends events behind all earlier ones, now or within `gather_s`."""
        self._gathered += events
        loop = asyncio.get_running_loop()
        if loop.time() >= self._not_before_s:
            self.pack()
        elif self._timer is None:
            self._timer = loop.call_at(self._not_before_s, self.pack)

    def pack(self) -> None:
        """Makes the gathered events a batch, or several when one message cannot hold them. `last_event_id` then counts
        all that was published."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        events, self._gathered = self._gathered, []
        if not events:
            return
        self._not_before_s = asyncio.get_running_loop().time() + self._gather_s
        for part in split_events(events):
            self._last_event_id += 1
            batch = KvEventBatch(MAJOR, self._worker_id, self._incarnation, self._last_event_id, time.time(), part)
            payload = encode_batch(batch)
            self._waiting.append(_Batch(self._last_event_id, payload))
            self._buffered_bytes += len(payload)
        self._drop_oldest()
        self._idle.clear()
        self._wake.set()

    async def flush(self, timeout_s: float) -> bool:
        """Waits until JetStream has everything; False when the time is up first."""
        self.pack()
        return await happens(self._idle, timeout_s)

    async def close(self) -> None:
        """Waits up to CLOSE_TIMEOUT_S for batches on their way, then stops."""
        self.pack()
        if self._nats.connected:
            await self.flush(CLOSE_TIMEOUT_S)
        await end_tasks(self._task)
        self._take_back()

    async def _run(self) -> None:
        while True:
            await self._nats.wait_connected()
            try:
                await self._send_waiting()
            except Exception as error:
                self._failures += 1
                if self._failures.bit_count() == 1:  # the 1st, 2nd, 4th, 8th, ...
                    self._warn(error)
                self._take_back()
                self._stream_exists = False
                await asyncio.sleep(RETRY_S)

    def _warn(self, error: Exception) -> None:
        why = str(error) or type(error).__name__
        if getattr(error, "err_code", None) == NO_STORAGE:
            why = "NATS has no storage left: free space on the disk of nats.store_dir, or name a folder on another disk"
        unexpected = not isinstance(error, NATS_ERRORS)
        failed = self._failures
        log.warning("events not published", worker=self._worker_id, error=why, failed=failed, exc_info=unexpected)

    async def _send_waiting(self) -> None:
        """Sends what waits. Never returns. Raises NATS_ERRORS when the connection or an acknowledgement failed."""
        while True:
            if not self._stream_exists:
                await self._nats.ensure_stream(self._stream)
                self._stream_exists = True
            while self._waiting and len(self._sent) < WINDOW:
                batch = self._waiting.popleft()
                try:
                    future = await self._nats.publish_pipelined(self._subject, batch.payload)
                except nats_errors.MaxPayloadError:
                    self._drop(batch, "larger than this server's limit for a message")
                    continue
                except Exception:
                    self._waiting.appendleft(batch)
                    raise
                future.add_done_callback(lambda _: self._wake.set())
                self._sent.append(_Sent(batch, future, time.monotonic()))
            self._wake.clear()
            self._take_acknowledgements()
            if self._waiting and len(self._sent) < WINDOW:
                continue
            if not self._sent:
                await self._wake.wait()
                continue
            async with asyncio.timeout_at(self._ack_deadline()):
                await self._wake.wait()

    def _take_acknowledgements(self) -> None:
        """Takes the acknowledgements of the oldest batches. Raises what JetStream answered instead, or TimeoutError."""
        while self._sent and self._sent[0].acknowledged.done():
            self._sent[0].acknowledged.result()
            self._buffered_bytes -= len(self._sent.popleft().batch.payload)
            self._failures = 0
        if self._sent and time.monotonic() - self._sent[0].since > ACK_TIMEOUT_S:
            raise TimeoutError("no acknowledgement from JetStream")
        if not self._sent and not self._waiting:
            self._idle.set()

    def _ack_deadline(self) -> float:
        waited_s = time.monotonic() - self._sent[0].since
        return asyncio.get_running_loop().time() + max(0.0, ACK_TIMEOUT_S - waited_s)

    def _take_back(self) -> None:
        """Counts all batches on their way as not sent."""
        for sent in self._sent:
            if not sent.acknowledged.cancel() and not sent.acknowledged.cancelled():
                sent.acknowledged.exception()  # looked at, or asyncio complains
        batches = [*self._waiting, *(sent.batch for sent in self._sent)]
        self._waiting = deque(sorted(batches, key=lambda batch: batch.event_id))
        self._sent.clear()

    def _drop_oldest(self) -> None:
        """Drops batches while the buffer is over its limit."""
        while self._buffered_bytes > self._buffer_limit and len(self._waiting) > 1:
            self._drop(self._waiting.popleft(), "the buffer is full")

    def _drop(self, batch: _Batch, why: str) -> None:
        """A router that misses the batch takes a snapshot."""
        self._buffered_bytes -= len(batch.payload)
        self.dropped_batches += 1
        if self.dropped_batches.bit_count() == 1:  # the 1st, 2nd, 4th, 8th, ...
            dropped = self.dropped_batches
            log.warning(
                "event batch dropped", worker=self._worker_id, why=why, event_id=batch.event_id, dropped=dropped
            )

    def _disconnected(self) -> None:
        self._stream_exists = False  # the server may come back without its storage
        self._take_back()  # acknowledgements on their way died with the connection
        self._wake.set()


def split_events(events: list[KvEvent]) -> Iterator[list[KvEvent]]:
    """The same events in the same order, as lists that each fit into a NATS message."""
    part: list[KvEvent] = []
    size = 0
    for event in events:
        for piece in _split_event(event):
            piece_bytes = _size(piece)
            if part and size + piece_bytes > BATCH_HASH_BYTES:
                yield part
                part, size = [], 0
            part.append(piece)
            size += piece_bytes
    if part:
        yield part


def _split_event(event: KvEvent) -> Iterator[KvEvent]:
    """Cuts runs that are longer than a batch."""
    step = BATCH_HASH_BYTES // (2 * HASH_BYTES) * HASH_BYTES
    match event:
        case Stored():
            yield from event.parts(BATCH_HASH_BYTES)
        case Removed() | Moved() if len(event.sequence_hashes) > step:
            for start in range(0, len(event.sequence_hashes), step):
                yield msgspec.structs.replace(event, sequence_hashes=event.sequence_hashes[start : start + step])
        case _:
            yield event


def _size(event: KvEvent) -> int:
    """Bytes of the event's hashes, and FRAME_BYTES."""
    return FRAME_BYTES + sum(len(run) for run in msgspec.structs.astuple(event) if isinstance(run, bytes))


def stream_config(namespace: str) -> StreamConfig:
    """The stream keeps an hour of events, so that a router can fetch what it missed."""
    return StreamConfig(
        name=kv_events_stream(namespace),
        subjects=[kv_events_subject(namespace)],
        storage=StorageType.FILE,
        max_age=MAX_AGE_S,
        max_bytes=MAX_STREAM_BYTES,
        allow_direct=True,
    )
