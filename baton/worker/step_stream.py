"""The `Steps` stream: commands of one router come in, one message per engine step goes out.

Owns the open streams. What is to be sent is collected per router; when a router reads slowly, or steps are quicker than
`workers.gather_ms`, the news of several steps leave in one message, with one delta per request.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc
import structlog

from baton.worker.hello import receive_hello
from baton_proto.discovery import WorkerLoad
from baton_proto.worker import Cancel, Delta, Hello, StepMessage, Submit, WorkerCommand

log = structlog.get_logger()


class RouterStream:
    """One router's open stream. Event loop only.

    News that somebody waits for, the first and the last of a request, leave at once. The rest leaves at most every
    `gather_s`, for what a message costs the router hardly depends on how many tokens are in it.
    """

    def __init__(self, router_id: str, gather_s: float) -> None:
        self.router_id = router_id
        self._gather_s = gather_s
        self._deltas: dict[str, list[Delta]] = {}  # by request
        self._due = asyncio.Event()
        self._not_before_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def send(self, delta: Delta) -> None:
        """Leaves with everything else that is sent before the event loop comes around."""
        self._deltas.setdefault(delta.request_id, []).append(delta)
        if delta.cached_tokens is not None or delta.finish is not None or delta.failure is not None:
            self._due.set()
        else:
            self.wake()

    def wake(self) -> None:
        """There is a new load to report, if nothing else."""
        if self._timer is not None or self._due.is_set():
            return
        loop = asyncio.get_running_loop()
        if loop.time() >= self._not_before_s:
            self._due.set()
        else:
            self._timer = loop.call_at(self._not_before_s, self._due.set)

    def close(self) -> None:
        """Ends the stream after what is pending was written."""
        self._closed = True
        self._due.set()

    async def take(self) -> list[Delta] | None:
        """Waits for news; None when the stream is closed and all is written."""
        await self._due.wait()
        deltas = list(map(_joined, self._deltas.values()))
        self._deltas.clear()
        if self._closed:
            return deltas or None
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._not_before_s = asyncio.get_running_loop().time() + self._gather_s
        return deltas


class StepHandler(Protocol):
    """What a worker does with a router's commands."""

    def submit(self, router: RouterStream, request: Submit) -> None: ...

    def cancel(self, router: RouterStream, request_id: str) -> None: ...

    def router_gone(self, router: RouterStream) -> None:
        """Nobody listens any more: end the router's requests."""
        ...


class StepStreams:
    def __init__(self, ours: Hello, handler: StepHandler, gather_s: float) -> None:
        self._ours = ours
        self._gather_s = gather_s
        self._handler = handler
        self._open: set[RouterStream] = set()
        self._load = WorkerLoad()

    async def serve(
        self, commands: AsyncIterator[WorkerCommand], context: grpc.aio.ServicerContext[WorkerCommand, Any]
    ) -> None:
        """gRPC handler of `Steps`."""
        commands = aiter(commands)
        hello = await receive_hello(commands, context, self._ours)
        router = RouterStream(hello.sender, self._gather_s)
        self._open.add(router)
        log.info("router connected", router=router.router_id)
        reader = asyncio.create_task(self._read(router, commands))
        try:
            await self._write(router, context)
            if reader.done():
                reader.result()  # raises what a malformed command raised: the router gets an error status
        finally:
            reader.cancel()
            self._open.discard(router)
            self._handler.router_gone(router)
            log.info("router disconnected", router=router.router_id)

    def publish_load(self, load: WorkerLoad) -> None:
        """Once per engine step, after the step's deltas were sent."""
        self._load = load
        for router in self._open:
            router.wake()

    def close(self) -> None:
        for router in self._open:
            router.close()

    async def _read(self, router: RouterStream, commands: AsyncIterator[WorkerCommand]) -> None:
        try:
            async for command in commands:
                match command:
                    case Submit():
                        self._handler.submit(router, command)
                    case Cancel():
                        self._handler.cancel(router, command.request_id)
                    case Hello():
                        log.warning("second hello ignored", router=router.router_id)
        finally:
            router.close()

    async def _write(self, router: RouterStream, context: grpc.aio.ServicerContext[WorkerCommand, Any]) -> None:
        while (deltas := await router.take()) is not None:
            await context.write(StepMessage(deltas, self._load))


def _joined(deltas: list[Delta]) -> Delta:
    """The news of one request, in order, as one delta."""
    first, last = deltas[0], deltas[-1]
    if first is last:
        return first
    return Delta(
        first.request_id,
        [token_id for delta in deltas for token_id in delta.token_ids],
        [logprobs for delta in deltas for logprobs in delta.logprobs],
        first.cached_tokens,
        first.handoff,
        last.finish,
        last.stop_token,
        last.failure,
    )
