"""The gRPC server of a worker: the questions that prefill and decode workers answer alike."""

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import grpc
import psutil

from baton_proto import worker as wire
from baton_proto.decoding import decoder
from baton_proto.version import VersionError, check_major
from runtime.address import format_address
from runtime.security.bearer_keys import BearerKeys
from runtime.security.cluster_key import WORKER_CALLS
from runtime.security.grpc_bearer import LOOKAHEAD_BYTES, SERVER_OPTIONS, RequireBearer
from runtime.security.grpc_server import grpc_server
from worker.changes.adapters import change_adapter
from worker.changes.sleep import Sleeper
from worker.changes.weights_update import WeightsUpdater
from worker.runtime import WorkerRuntime
from worker.snapshot import chunks, take_snapshot

T = TypeVar("T")

Context = grpc.aio.ServicerContext[Any, Any]

OPTIONS = [
    *SERVER_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", LOOKAHEAD_BYTES),  # questions are short
    ("grpc.max_concurrent_streams", 64),  # a connection takes 1 MiB at most before its calls are served
]


class WorkerService:
    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime
        self._sleeper = Sleeper(runtime)
        self._updater = WeightsUpdater(runtime, self._sleeper)
        self._changes: set[asyncio.Task[Any]] = set()
        guards: list[grpc.aio.ServerInterceptor] = []
        if (cluster := runtime.keys.cluster) is not None:
            guards.append(RequireBearer(BearerKeys.plain([cluster.derive(WORKER_CALLS)]), "cluster key"))
        self._server = grpc_server(OPTIONS, guards)
        answers: dict[wire.Question[Any], Any] = {
            wire.SNAPSHOT: self._snapshot,
            wire.INSPECT: self._inspect,
            wire.DRAIN: self._drain,
            wire.SLEEP: self._sleep,
            wire.WAKE: self._wake,
            wire.UPDATE: self._update,
            wire.ADAPT: self._adapt,
        }
        rows = {question.name: _row(question, answers[question]) for question in wire.QUESTIONS}
        self._server.add_registered_method_handlers(wire.SERVICE, rows)

    async def start(self, host: str) -> str:
        """Returns HOST:PORT."""
        address, cluster = format_address(host, 0), self._runtime.keys.cluster
        if cluster is None or cluster.tls is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, cluster.tls.grpc_server())
        await self._server.start()
        return format_address(host, port)

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)

    async def _snapshot(self, request: wire.SnapshotRequest, context: Context) -> AsyncIterator[wire.SnapshotChunk]:
        snapshot = await take_snapshot(self._runtime.bridge, self._runtime.publisher)
        for chunk in chunks(snapshot, self._runtime.incarnation):
            yield chunk

    async def _inspect(self, request: wire.InspectRequest, context: Context) -> wire.InspectReport:
        runtime = self._runtime
        problems = await runtime.bridge.call(lambda engine: engine.check_integrity())
        await runtime.fresh_load()
        runtime.publisher.pack()  # so that the last event id counts all events up to this load
        return wire.InspectReport(
            worker_id=runtime.worker_id,
            incarnation=runtime.incarnation,
            state=runtime.state,
            load=runtime.load,
            problems=problems + runtime.role.check_integrity(),
            rss_bytes=psutil.Process(os.getpid()).memory_info().rss,
        )

    async def _drain(self, request: wire.DrainRequest, context: Context) -> wire.DrainReport:
        return wire.DrainReport(await self._runtime.drain(request.timeout_s))

    async def _sleep(self, request: wire.SleepRequest, context: Context) -> wire.SleepReport:
        return await self._to_the_end(self._sleeper.sleep(request.level, request.timeout_s))

    async def _wake(self, request: wire.WakeRequest, context: Context) -> wire.SleepReport:
        return await self._to_the_end(self._sleeper.wake(tuple(request.tags)))

    async def _update(self, request: wire.UpdateRequest, context: Context) -> wire.UpdateReport:
        return await self._to_the_end(self._updater.update(request))

    async def _adapt(self, request: wire.AdapterRequest, context: Context) -> wire.AdapterReport:
        return await self._to_the_end(change_adapter(self._runtime, request))

    async def _to_the_end(self, change: Coroutine[Any, Any, T]) -> T:
        """A caller that leaves stops nothing half-way: the worker would neither sleep nor serve."""
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)


def _row(question: wire.Question[Any], answer: Any) -> Any:
    async def check(request: Any, context: Context) -> None:
        try:
            check_major(f"question {question.name}", request.version, wire.MAJOR)
        except VersionError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    async def answer_one(request: Any, context: Context) -> Any:
        await check(request, context)
        return await answer(request, context)

    async def answer_many(request: Any, context: Context) -> AsyncIterator[Any]:
        await check(request, context)
        async for part in answer(request, context):
            yield part

    decode = decoder(question.request)
    if question.streamed:
        return grpc.unary_stream_rpc_method_handler(answer_many, decode, wire.encode)
    return grpc.unary_unary_rpc_method_handler(answer_one, decode, wire.encode)
