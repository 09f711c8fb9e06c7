"""The client of a worker's gRPC service: one method per question (baton_proto.worker.QUESTIONS)."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc
from msgspec import Struct

from baton_proto import worker as wire
from baton_proto.decoding import decoder
from runtime.errors import UnavailableError, WorkerLostError
from runtime.security.cluster_key import WORKER_CALLS, ClusterKey
from runtime.security.grpc_bearer import metadata

if TYPE_CHECKING:
    from runtime.security.contexts import Pair

CALL_TIMEOUT_S = 5.0  # for an answer, beyond the time that the question itself grants
MEMORY_TIMEOUT_S = 60.0  # to copy or read the weights
READ_TIMEOUT_S = 1800.0  # to read and check a checkpoint

CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # a new client never inherits the back-off of a dead one
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),  # also the limit of one connection attempt
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
]

Answer = TypeVar("Answer", bound=Struct)
Done = TypeVar("Done", wire.SleepReport, wire.UpdateReport)


class WorkerClient:
    """Every question raises WorkerLostError when the worker does not answer, or not in a form that can be used.

    `rpc_address`: HOST:PORT. `incarnation`: the one whose snapshot is wanted; None: that of whichever worker answers.
    """

    def __init__(
        self, worker_id: str, rpc_address: str, key: ClusterKey | None = None, incarnation: int | None = None
    ) -> None:
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._metadata = metadata(None if key is None else key.derive(WORKER_CALLS))
        self._address = rpc_address
        self._tls = None if key is None else key.tls
        self._channels: list[grpc.aio.Channel] = []  # the last one is in use, the one before may have calls in flight
        self._shown: Pair | None = None  # by the last channel

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def inspect(self, timeout_s: float = CALL_TIMEOUT_S) -> wire.InspectReport:
        return await self._ask(wire.INSPECT, wire.InspectRequest(wire.MAJOR), timeout_s)

    async def drain(self, timeout_s: float) -> wire.DrainReport:
        """The worker takes no new request. Returns when all requests have ended or `timeout_s` is over."""
        return await self._ask(wire.DRAIN, wire.DrainRequest(wire.MAJOR, timeout_s), timeout_s + CALL_TIMEOUT_S)

    async def sleep(self, level: int, timeout_s: float) -> wire.SleepReport:
        """`timeout_s`: for requests in flight, and again for peers. Raises UnavailableError when it stays awake."""
        request = wire.SleepRequest(wire.MAJOR, level, timeout_s)
        return self._done(await self._ask(wire.SLEEP, request, 2 * timeout_s + wire.LAST_STEPS_S + MEMORY_TIMEOUT_S))

    async def wake(self, tags: list[str] | None = None) -> wire.SleepReport:
        """Wakes the worker, completely if there are no tags. Raises UnavailableError when it sleeps on."""
        return self._done(await self._ask(wire.WAKE, wire.WakeRequest(wire.MAJOR, tags or []), MEMORY_TIMEOUT_S))

    async def update(self, step: str, folder: str, timeout_s: float) -> wire.UpdateReport:
        """One step of new weights, see wire.UpdateRequest. Raises UnavailableError with the worker's reason."""
        request = wire.UpdateRequest(wire.MAJOR, folder, step, timeout_s)
        waits_s = 2 * timeout_s + CALL_TIMEOUT_S if step == "hold" else READ_TIMEOUT_S
        return self._done(await self._ask(wire.UPDATE, request, waits_s))

    async def adapt(self, name: str, folder: str) -> wire.AdapterReport:
        """Loads or unloads an adapter, see wire.AdapterRequest. Raises UnavailableError with the worker's reason."""
        report = await self._ask(wire.ADAPT, wire.AdapterRequest(wire.MAJOR, name, folder), MEMORY_TIMEOUT_S)
        if report.problem:
            raise UnavailableError(f"{self._worker_id}: {report.problem}")
        return report

    async def snapshot(self, timeout_s: float) -> AsyncIterator[wire.SnapshotChunk]:
        """The worker's block table in order; ends after the chunk that is marked as last."""
        make = await self._call(wire.SNAPSHOT)
        call = make(wire.SnapshotRequest(wire.MAJOR), timeout=timeout_s, metadata=self._metadata)
        try:
            async for chunk in call:
                if chunk is None or self._incarnation not in (None, chunk.incarnation):
                    raise WorkerLostError(self._worker_id, "sent a snapshot that cannot be used")
                yield chunk
                if chunk.last:
                    return
        except grpc.aio.AioRpcError as error:
            raise self._lost(error) from error
        raise WorkerLostError(self._worker_id, "the snapshot ended early")

    async def _call(self, question: wire.Question[Any]) -> Any:
        channel = await self._channel()
        make: Any = channel.unary_stream if question.streamed else channel.unary_unary
        return make(question.method, wire.encode, decoder(question.answer))

    async def _channel(self) -> grpc.aio.Channel:
        """A channel whose certificate is the present one: gRPC connects again with what the channel was made with."""
        shown = None if self._tls is None else self._tls.pair()
        if not self._channels or shown is not self._shown:
            self._shown = shown
            self._channels.append(self._new_channel())
            for former in self._channels[:-2]:
                await former.close()
            del self._channels[:-2]
        return self._channels[-1]

    def _new_channel(self) -> grpc.aio.Channel:
        if self._tls is None:
            return grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS)
        options = [*CHANNEL_OPTIONS, *self._tls.grpc_options]
        return grpc.aio.secure_channel(self._address, self._tls.grpc_client(), options=options)

    async def _ask(self, question: wire.Question[Answer], request: Struct, timeout_s: float) -> Answer:
        try:
            call = await self._call(question)
            report: Answer | None = await call(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._lost(error) from error
        if report is None:  # gRPC returns None for bytes that the decoder refuses
            raise WorkerLostError(self._worker_id, "sent an answer that cannot be decoded")
        return report

    def _done(self, report: Done) -> Done:
        if report.problem:
            raise UnavailableError(f"{self._worker_id} {report.problem}")
        return report

    def _lost(self, error: grpc.aio.AioRpcError) -> WorkerLostError:
        return WorkerLostError(self._worker_id, f"{error.code().name}: {error.details()}")
