"""A worker that follows a script, behind real sockets: for what the protocol allows and real workers rarely do.

Its "model" is a function of the whole token list: a replay that loses or doubles a token changes all that follows.
"""

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np
from msgspec import Struct

from baton_proto.decoding import decoder
from baton_proto.discovery import WorkerLoad, WorkerRecord, weights_tag
from baton_proto.kv_events import Stored
from baton_proto.token_counts import TokenCounts
from baton_proto.worker import (
    MAJOR,
    SERVICE,
    Cancel,
    Delta,
    DrainReport,
    DrainRequest,
    Handoff,
    Hello,
    InspectReport,
    InspectRequest,
    SnapshotChunk,
    SnapshotRequest,
    StepMessage,
    Submit,
    WorkerCommand,
    decode_greeting,
    encode,
)
from runtime.discovery.directory import Change
from runtime.security.cluster_key import ClusterKey
from runtime.security.handshake import STREAM_PLANE, listening
from runtime.streams.message_stream import MessageStream, accept_streams

COUNTS = TokenCounts(cached_tokens=16)
FIRST_TOKEN, LAST_TOKEN = 40, 90  # plain characters of the tiny model's vocabulary


def next_token(token_ids: list[int]) -> int:
    digest = zlib.crc32(np.array(token_ids, dtype="<u4").tobytes())
    return FIRST_TOKEN + digest % (LAST_TOKEN - FIRST_TOKEN)


def greedy(prompt: list[int], num_tokens: int) -> list[int]:
    """What an undisturbed worker answers."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


def tokens_of(submit: Submit) -> list[int]:
    tokens: list[int] = np.frombuffer(submit.token_ids, dtype="<u4").tolist()
    return tokens


Script = Callable[["ScriptedWorker", Submit], Awaitable[None]]


async def answer(worker: "ScriptedWorker", submit: Submit) -> None:
    """Answers to the end, a token per step."""
    await answer_until(worker, submit, None)


async def answer_until(worker: "ScriptedWorker", submit: Submit, num_tokens: int | None) -> None:
    """Stops in mid-answer after `num_tokens` of this attempt."""
    token_ids = tokens_of(submit)
    last = submit.num_prompt_tokens + submit.sampling.max_tokens
    until = last if num_tokens is None else min(last, len(token_ids) + num_tokens)
    first = True
    while len(token_ids) < until:
        await asyncio.sleep(0)
        token_ids.append(next_token(token_ids))
        handoff = None
        if first and submit.prefill is not None:
            handoff = Handoff(
                submit.prefill.worker_id, kv_blocks=3, kv_bytes=300, transport="shm", prompt_counts=COUNTS
            )
        worker.send(
            Delta(
                submit.request_id,
                token_ids=token_ids[-1:],
                prompt_counts=COUNTS if first else None,
                handoff=handoff,
                finish="length" if len(token_ids) == last else None,
                weights=weights_tag(worker.model_hash) if first else 0,
            )
        )
        first = False


def steps_of(*scripts: Script) -> Script:
    """One script per submission, in order; the last one for all that follow."""
    remaining = list(scripts)

    async def run(worker: "ScriptedWorker", submit: Submit) -> None:
        script = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        await script(worker, submit)

    return run


class ScriptedWorker:
    def __init__(
        self,
        worker_id: str,
        role: str = "decode",
        script: Script = answer,
        incarnation: int = 1,
        key: ClusterKey | None = None,
    ) -> None:
        self._key = key
        self.worker_id = worker_id
        self.role = role
        self.script = script
        self.incarnation = incarnation
        self.hello = Hello(MAJOR, worker_id, incarnation)
        self.max_model_len = 4096
        self.kv_form = ""
        self.model_hash = "hash"
        self.adapters: tuple[str, ...] = ()
        self.adapter_places = 0
        self.load = WorkerLoad(blocks_total=256)
        self.submits: list[Submit] = []
        self.cancels: list[str] = []
        self.connections = 0
        self.problems: list[str] = []
        self.refusals = 0  # streams that expected another incarnation
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: grpc.aio.Server | None = None
        self.address = self.stream_address = "127.0.0.1:0"
        self._streams: asyncio.Server | None = None
        self._stream: MessageStream | None = None  # of the router, after the hellos

    def record(self, state: str = "ready") -> WorkerRecord:
        return WorkerRecord(
            version=1,
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=self.role,
            state=state,
            rpc_address=self.address,
            stream_address=self.stream_address,
            transfer=None,
            model="tiny",
            model_hash=self.model_hash,
            block_size=16,
            num_blocks=256,
            max_model_len=self.max_model_len,
            pid=0,
            kv_form=self.kv_form,
            adapters=self.adapters,
            adapter_places=self.adapter_places,
        )

    def added(self, state: str = "ready") -> Change:
        return Change("added", self.record(state))

    def changed(self, state: str) -> Change:
        return Change("changed", self.record(state))

    def send(self, delta: Delta) -> None:
        self.send_any(StepMessage([delta], self.load))

    def send_any(self, message: Struct) -> None:
        if self._stream is not None:
            self._stream.send(message)

    def report(self, load: WorkerLoad) -> None:
        self.load = load
        self.send_any(StepMessage([], load))

    async def until(self, condition: Callable[[], bool]) -> None:
        """For what the router does."""
        async with asyncio.timeout(30):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def start(self) -> None:
        """On the same address as before when it is started again."""
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        methods = {
            "Snapshot": grpc.unary_stream_rpc_method_handler(self._snapshot, decoder(SnapshotRequest), encode),
            "Inspect": grpc.unary_unary_rpc_method_handler(self._inspect, decoder(InspectRequest), encode),
            "Drain": grpc.unary_unary_rpc_method_handler(self._drain, decoder(DrainRequest), encode),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        port = server.add_insecure_port(self.address)
        self.address = f"127.0.0.1:{port}"
        await server.start()
        self._server = server
        self._streams = await accept_streams("127.0.0.1", int(self.stream_address.rpartition(":")[2]), self._accepted)
        self.stream_address = f"127.0.0.1:{self._streams.sockets[0].getsockname()[1]}"

    async def die(self) -> None:
        """At once, all connections broken."""
        for task in self._tasks:
            task.cancel()
        if self._streams is not None:
            self._streams.close()
        if self._stream is not None:
            self._stream.abort("the worker dies")
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.die()

    def _accepted(self, stream: MessageStream) -> None:
        task = asyncio.create_task(self._steps(stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _steps(self, stream: MessageStream) -> None:
        if self._key is not None:
            await stream.shake_hands(listening(self._key, STREAM_PLANE, stream.peer))
        hello = await stream.receive(decode_greeting)
        if hello.incarnation not in (0, self.incarnation):
            self.refusals += 1
            self._news.set()
            stream.refuse("another incarnation")
            return
        stream.send(self.hello)
        self._stream = stream
        self.connections += 1
        self._news.set()
        stream.listen(decoder(WorkerCommand), self._command)

    def _command(self, command: WorkerCommand) -> None:
        match command:
            case Submit():
                self.submits.append(command)
                task = asyncio.create_task(self._run(command))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Cancel():
                self.cancels.append(command.request_id)
        self._news.set()

    async def _run(self, submit: Submit) -> None:
        try:
            await self.script(self, submit)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.problems.append(f"script: {error!r}")

    async def _snapshot(self, request: SnapshotRequest, context: Any) -> AsyncIterator[SnapshotChunk]:
        run = Stored(None, bytes(8), bytes(8))
        yield SnapshotChunk(self.incarnation, 7, [run], last=False)
        yield SnapshotChunk(self.incarnation, 7, [], last=True)

    async def _inspect(self, request: InspectRequest, context: Any) -> InspectReport:
        return InspectReport(self.worker_id, self.incarnation, "ready", self.load, self.problems, 0)

    async def _drain(self, request: DrainRequest, context: Any) -> DrainReport:
        return DrainReport(0)
