"""Who is alive: workers announce themselves in a NATS key-value bucket, routers and the planner watch.

A worker's `Announcer` rewrites the worker's record every heartbeat. A `Directory` gets these writes as plain messages,
which need no watcher that could die in an outage, and reads the bucket once, at its start. A worker is removed when it
withdraws, or when it was silent for `ttl_s` by the Directory's own looks, and did not merely wait for a core. No worker
is removed because NATS is away: silence counts only while a round trip to the server works, and after an outage each
worker has a full `ttl_s` again.

Of two processes that announce the same name, the one that started last is listed. When it goes, the other one is listed
again.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import msgspec
import structlog

from baton_proto.discovery import WorkerRecord, decode_head, decode_record
from baton_proto.spoken import check_spoken
from baton_proto.version import VersionError
from runtime.end_task import end_tasks
from runtime.errors import DeadlineError, ProtocolError
from runtime.host import pid_here
from runtime.nats.bucket import bucket_config
from runtime.nats.client import NATS_ERRORS, NatsClient
from runtime.nats.library import StorageType, StreamConfig
from runtime.nats.skipped import skipped
from runtime.nats.subjects import worker_of, workers_key, workers_stream
from runtime.silence import Silence
from runtime.within import happens

TTL_S: Final = 4.0  # of a silent worker: three of its heartbeats may be lost, or late
HEARTBEAT_S: Final = TTL_S / 4
RETRY_S = 0.25
STORED_S = 1.0  # within which NATS stores a heartbeat, or it is tried again
WITHDRAW_TIMEOUT_S = 1.0
LOOKS_PER_TTL = 16

# Headers of a delete marker: the first is that of NATS key-value clients, the second is our own.
KV_OPERATION = "KV-Operation"
INCARNATION = "Baton-Incarnation"

log = structlog.get_logger()


class Announcer:
    """Keeps one worker's record in the bucket fresh, through NATS outages and the loss of its storage."""

    def __init__(
        self, nats: NatsClient, record: WorkerRecord, heartbeat_s: float = HEARTBEAT_S, ttl_s: float = TTL_S
    ) -> None:
        self._nats = nats
        self._record = record
        self._heartbeat_s = heartbeat_s
        self._bucket = _workers_bucket(nats.namespace, ttl_s)
        self._subject = workers_key(nats.namespace, record.worker_id)
        self._bucket_exists = False
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        nats.on_reconnect(self._reconnected)

    async def start(self) -> None:
        """Returns when the record is in the bucket."""
        while not await self._write():
            await asyncio.sleep(RETRY_S)
        self._task = asyncio.create_task(self._heartbeats())

    async def set_state(self, state: str, model_hash: str | None = None) -> None:
        """ "ready" | "draining" | "sleeping". Written at once; when NATS is away, as soon as it is back. `model_hash`:
        None: as it was."""
        model_hash = model_hash or self._record.model_hash
        self._record = msgspec.structs.replace(self._record, state=state, model_hash=model_hash)
        await self._write()

    async def tell(self, note: str, adapters: tuple[str, ...], folders: tuple[str, ...] = ()) -> None:
        """Written at once where they are others."""
        told = msgspec.structs.replace(self._record, note=note, adapters=adapters, adapter_folders=folders)
        if told != self._record:
            self._record = told
            await self._write()

    async def withdraw(self) -> None:
        """Ends the heartbeats and deletes the record; when NATS is away, the record expires instead. Idempotent."""
        if self._task is None:
            return
        await end_tasks(self._task)
        self._task = None
        headers = {KV_OPERATION: "DEL", INCARNATION: str(self._record.incarnation)}
        try:
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                await self._nats.publish_stored(self._subject, b"", headers)
        except NATS_ERRORS as error:
            log.warning("could not withdraw; the record will expire", worker=self._record.worker_id, error=str(error))

    async def _heartbeats(self) -> None:
        written = True
        while True:
            await happens(self._wake, self._heartbeat_s if written else RETRY_S)
            self._wake.clear()
            written = await self._write()

    async def _write(self) -> bool:
        payload = msgspec.json.encode(self._record)
        try:
            async with asyncio.timeout(STORED_S):
                if not self._bucket_exists:
                    await self._nats.publish(self._subject, payload)  # those who listen hear it, and nobody stores it
                    await self._nats.ensure_stream(self._bucket)
                    self._bucket_exists = True
                await self._nats.publish_stored(self._subject, payload)
        except Exception as error:
            self._bucket_exists = False  # perhaps
            if self._nats.connected:  # else the client has logged the outage
                why, unexpected = str(error) or type(error).__name__, not isinstance(error, NATS_ERRORS)
                log.warning("heartbeat failed", worker=self._record.worker_id, error=why, exc_info=unexpected)
            return False
        return True

    def _reconnected(self) -> None:
        self._bucket_exists = False  # the server may have lost its storage
        self._wake.set()


@dataclass(frozen=True, slots=True)
class Change:
    """A change in the directory. A worker that started again is removed (its old incarnation), then added."""

    kind: Literal["added", "changed", "removed"]
    record: WorkerRecord


@dataclass(frozen=True, slots=True)
class _Older:
    """A process whose name a later one has. It was heard since."""

    record: WorkerRecord
    payload: bytes
    deadline_s: float  # monotonic


@dataclass(frozen=True, slots=True)
class Foreign:
    """A worker that no process of this version can talk to."""

    role: str  # as it says; empty when it does not
    why: str
    deadline_s: float  # monotonic


class Directory:
    """The live workers of the namespace, as seen from here. Event loop only."""

    def __init__(self, nats: NatsClient, ttl_s: float = TTL_S) -> None:
        self._nats = nats
        self._ttl_s = ttl_s
        self._workers: dict[str, WorkerRecord] = {}
        self._older: dict[str, _Older] = {}  # by worker
        self._foreign: dict[str, Foreign] = {}  # by worker
        self._payloads: dict[str, bytes] = {}  # the last ones: most heartbeats change nothing
        self._silences: dict[str, Silence] = {}
        self._look_s = ttl_s / LOOKS_PER_TTL
        self._callbacks: list[Callable[[Change], None]] = []
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._heard: set[str] | None = set()  # subjects, until the bucket is read
        self.lost = 0  # workers that were removed without having withdrawn
        nats.on_reconnect(self._grant_grace)

    @property
    def workers(self) -> Mapping[str, WorkerRecord]:
        """The live workers by id; a live view."""
        return MappingProxyType(self._workers)

    def namesake(self, worker_id: str) -> WorkerRecord | None:
        """The live process that announces the same name and started before the one in `workers`."""
        older = self._older.get(worker_id)
        return older.record if older is not None and older.deadline_s > time.monotonic() else None

    @property
    def foreign(self) -> dict[str, Foreign]:
        """The live workers of another version of the protocol by id; they are not among `workers`."""
        now_s = time.monotonic()
        return {name: one for name, one in self._foreign.items() if one.deadline_s > now_s}

    def on_change(self, callback: Callable[[Change], None]) -> None:
        """`callback` gets every change from now on, on the event loop. It must not block."""
        self._callbacks.append(callback)

    async def start(self) -> None:
        """Returns when the workers that the bucket holds are known."""
        await self._nats.subscribe(workers_key(self._nats.namespace), self._hear)
        try:
            await self._read_bucket()
        except NATS_ERRORS as error:
            log.warning("discovery bucket not readable now; heartbeats will tell", error=str(error))
        self._heard = None
        self._task = asyncio.create_task(self._expire())

    async def wait_for(self, condition: Callable[[Mapping[str, WorkerRecord]], bool], timeout_s: float) -> None:
        """Returns when the condition holds. Raises DeadlineError."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition(self.workers):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise DeadlineError("the wait for workers", timeout_s) from error

    async def close(self) -> None:
        await end_tasks(self._task)

    async def _read_bucket(self) -> None:
        stream = workers_stream(self._nats.namespace)
        subjects = await self._nats.stored_subjects(stream, workers_key(self._nats.namespace))
        for message in await asyncio.gather(*(self._nats.stored_message(stream, subject) for subject in subjects)):
            if message is not None and message.subject is not None and message.subject not in (self._heard or ()):
                self._receive(message.subject, message.data or b"", message.headers or {})

    def _hear(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
        """What is heard is newer than what the bucket held, or comes again."""
        if self._heard is not None:
            self._heard.add(subject)
        self._receive(subject, payload, headers)

    def _receive(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
        worker_id = worker_of(subject)
        if KV_OPERATION in headers:
            self._foreign.pop(worker_id, None)
            known, older = self._workers.get(worker_id), self._older.get(worker_id)
            if older is not None and headers.get(INCARNATION) == str(older.record.incarnation):
                del self._older[worker_id]
            if known is not None and headers.get(INCARNATION, str(known.incarnation)) == str(known.incarnation):
                self._remove(worker_id, "withdrew")
                self._give_back(worker_id)
        elif self._payloads.get(worker_id) == payload:
            self._silences[worker_id].heard()
        else:
            try:
                record = decode_record(payload)
                check_spoken(record.speaks)
                if record.worker_id != worker_id:
                    where = f"worker record of {worker_id}"
                    raise ProtocolError(where, f"it names another worker: {record.worker_id!r}")
            except VersionError as error:
                self._note_foreign(worker_id, payload, str(error))
                return
            except (msgspec.DecodeError, ProtocolError) as error:
                skipped("worker record", subject, error)
                return
            self._update(record, payload)

    def _note_foreign(self, worker_id: str, payload: bytes, why: str) -> None:
        with contextlib.suppress(msgspec.DecodeError):
            role = decode_head(payload).role
            if worker_id not in self.foreign:
                log.warning("worker cannot be talked to", worker=worker_id, role=role, reason=why)
            self._foreign[worker_id] = Foreign(role, why, time.monotonic() + self._ttl_s)

    def _update(self, record: WorkerRecord, payload: bytes) -> None:
        known = self._workers.get(record.worker_id)
        if known is not None and record.incarnation < known.incarnation:
            if self.namesake(record.worker_id) is None:
                log.warning("two processes announce one name", worker=record.worker_id, address=record.rpc_address)
            self._older[record.worker_id] = _Older(record, payload, time.monotonic() + self._ttl_s)
            return
        if known is not None and known.incarnation < record.incarnation:
            self.lost += 1
            self._remove(record.worker_id, "was replaced")
            known = None
        self._workers[record.worker_id] = record
        self._payloads[record.worker_id] = payload
        self._silences[record.worker_id] = Silence(self._look_s, self._ttl_s, pid_here(record.process))
        if known is None:
            log.info("worker found", worker=record.worker_id, role=record.role, incarnation=record.incarnation)
        self._notify(Change("added" if known is None else "changed", record))

    def _remove(self, worker_id: str, why: str) -> None:
        record = self._workers.pop(worker_id)
        del self._payloads[worker_id], self._silences[worker_id]
        log.info(f"worker {why}", worker=worker_id, incarnation=record.incarnation)
        self._notify(Change("removed", record))

    def _give_back(self, worker_id: str) -> None:
        """Lists the process again whose name the one that is gone had taken."""
        older = self._older.pop(worker_id, None)
        if older is not None and older.deadline_s > time.monotonic():
            self._update(older.record, older.payload)

    def _notify(self, change: Change) -> None:
        self._changed.set()
        for callback in self._callbacks:
            callback(change)

    def _grant_grace(self) -> None:
        for silence in self._silences.values():
            silence.heard()

    async def _expire(self) -> None:
        """Removes a worker that is overdue before a round trip to NATS and still overdue after it. So neither an outage
        nor a blocked event loop looks like a dead worker."""
        while True:
            await asyncio.sleep(self._look_s)
            suspects = self._silent(self._silences)
            if not suspects:
                continue
            try:
                await self._nats.flush()
            except NATS_ERRORS:
                self._grant_grace()
                continue
            await asyncio.sleep(self._look_s)  # what came with the round trip is handled meanwhile
            if self._nats.connected:
                for worker_id in self._silent(suspects):
                    self.lost += 1
                    self._remove(worker_id, f"was silent for {self._ttl_s:g} s")
                    self._give_back(worker_id)

    def _silent(self, worker_ids: Iterable[str]) -> list[str]:
        """Looks at these workers once more."""
        return [each for each in worker_ids if (silence := self._silences.get(each)) is not None and silence.look()]


def _workers_bucket(namespace: str, ttl_s: float) -> StreamConfig:
    """The bucket lies in memory: every record is rewritten each heartbeat, and one that did not survive is announced
    again."""
    stream, keys = workers_stream(namespace), workers_key(namespace, ">")
    return bucket_config(stream, keys, storage=StorageType.MEMORY, max_age=ttl_s, duplicate_window=ttl_s)
