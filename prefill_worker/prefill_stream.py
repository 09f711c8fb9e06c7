"""The `Prefill` stream: prompts and grants of one decode worker come in, bad news goes out.

Good news travels with the KV.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc
import structlog

from baton.worker.hello import receive_hello
from baton_proto.worker import Hello, PrefillCancel, PrefillCommand, PrefillFailed, PrefillRequest

log = structlog.get_logger()


class DecodeStream:
    """One decode worker's open stream. Event loop only."""

    def __init__(self, decode_worker: str) -> None:
        self.decode_worker = decode_worker
        self._outgoing: asyncio.Queue[PrefillFailed | None] = asyncio.Queue()

    def send(self, failed: PrefillFailed) -> None:
        self._outgoing.put_nowait(failed)

    def close(self) -> None:
        """Ends the stream after what is pending was written."""
        self._outgoing.put_nowait(None)

    async def take(self) -> PrefillFailed | None:
        """None: the stream is closed."""
        return await self._outgoing.get()


class PrefillHandler(Protocol):
    def accept(self, stream: DecodeStream, request: PrefillRequest) -> None: ...

    def cancel(self, stream: DecodeStream, request_id: str) -> None: ...

    def decode_worker_gone(self, stream: DecodeStream) -> None:
        """Nobody wants the KV any more: end the stream's prompts."""
        ...


class PrefillStreams:
    def __init__(self, ours: Hello, handler: PrefillHandler) -> None:
        self._ours = ours
        self._handler = handler
        self._open: set[DecodeStream] = set()

    def close(self) -> None:
        for stream in self._open:
            stream.close()

    async def serve(
        self, commands: AsyncIterator[PrefillCommand], context: grpc.aio.ServicerContext[PrefillCommand, Any]
    ) -> None:
        """gRPC handler of `Prefill`."""
        commands = aiter(commands)
        hello = await receive_hello(commands, context, self._ours)
        stream = DecodeStream(hello.sender)
        log.info("decode worker connected", decode_worker=stream.decode_worker)
        self._open.add(stream)
        reader = asyncio.create_task(self._read(stream, commands))
        try:
            while (failed := await stream.take()) is not None:
                await context.write(failed)
            if reader.done():
                reader.result()  # raises what a malformed command raised: the decode worker gets an error status
        finally:
            reader.cancel()
            self._open.discard(stream)
            self._handler.decode_worker_gone(stream)
            log.info("decode worker disconnected", decode_worker=stream.decode_worker)

    async def _read(self, stream: DecodeStream, commands: AsyncIterator[PrefillCommand]) -> None:
        try:
            async for command in commands:
                match command:
                    case PrefillRequest():
                        self._handler.accept(stream, command)
                    case PrefillCancel():
                        self._handler.cancel(stream, command.request_id)
                    case Hello():
                        log.warning("second hello ignored", decode_worker=stream.decode_worker)
        finally:
            stream.close()
