"""The requests under way at one vLLM server, behind the names of vLLM's own core: each one is a stream of HTTP.

Invariant: when the server is lost, `get_output_async` raises before a broken stream ends its request. Hence no request
goes to a lost server again.
"""

import asyncio
import time
from dataclasses import dataclass, field
from types import SimpleNamespace, TracebackType
from typing import Final, Self

import structlog

from engine.vllm.engine import FINISHES
from engine.vllm.server.completion import END, PATH, Completion, Item, item_of, whole_item_of
from engine.vllm.server.gauges import Gauges
from engine.vllm.server.server import RefusedError, VllmServer
from runtime.end_task import end_tasks
from runtime.errors import BatonError, UnavailableError

WRONG_REQUEST: Final = (400, 413, 422)  # statuses of a server that cannot serve this request, and others well
CUT_SHORT: Final = "the answer stops before its end"
POLL_S: Final = 1.0  # between two looks at the server

log = structlog.get_logger()


@dataclass(slots=True)
class News:
    """What has come since the last news, with the names that vLLM's core gives it."""

    outputs: list[Item] = field(default_factory=list)
    scheduler_stats: SimpleNamespace | None = None
    timestamp: float = field(default_factory=time.monotonic)


class ServerCore:
    """A context, within which the server is watched. Event loop only."""

    def __init__(self, server: VllmServer) -> None:
        self._server = server
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._news = News()
        self._has_news = asyncio.Event()
        self._lost: UnavailableError | None = None
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._watch = asyncio.create_task(self._look_again_and_again())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._watch is not None, "__aenter__ came before"
        await end_tasks(self._watch, *self._streams.values())

    async def add_request_async(self, completion: Completion) -> None:
        task = self._streams[completion.request_id] = asyncio.create_task(self._follow(completion))
        task.add_done_callback(lambda _: self._streams.pop(completion.request_id, None))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """The server aborts a request whose connection is closed."""
        for request_id in request_ids:
            if task := self._streams.get(request_id):
                task.cancel()

    async def get_output_async(self) -> News:
        """Waits for news. Raises UnavailableError when the server is lost."""
        await self._has_news.wait()
        if self._lost is not None:
            raise self._lost
        self._has_news.clear()
        news, self._news = self._news, News()
        news.timestamp = time.monotonic()
        return news

    async def _follow(self, completion: Completion) -> None:
        last = Item(completion.request_id)
        try:
            if completion.streams:
                async for data in self._server.stream(PATH, completion.body):
                    if data == END:
                        break
                    last = item_of(completion.request_id, data)
                    if last.finish_reason is None or last.finish_reason in FINISHES:
                        self._tell(last)
            else:
                data = await self._server.ask(PATH, completion.body, is_patient=True)
                # On a thread, because log-probabilities of a prompt are megabytes.
                self._tell(last := await asyncio.to_thread(whole_item_of, completion, data))
        except (BatonError, RefusedError) as error:
            refused = isinstance(error, RefusedError) and error.status in WRONG_REQUEST
            last = Item(completion.request_id, finish_reason=str(error), refused=refused)
        if last.finish_reason not in FINISHES:
            await self._look()
            reason = last.finish_reason or CUT_SHORT
            self._tell(Item(completion.request_id, finish_reason=reason, refused=last.refused))

    def _tell(self, item: Item) -> None:
        self._news.outputs.append(item)
        self._has_news.set()

    async def _look_again_and_again(self) -> None:
        before: Gauges | None = None
        while self._lost is None:
            if (gauges := await self._look()) is not None:
                self._news.scheduler_stats = gauges.stats(before)
                before = gauges
                self._has_news.set()
            await asyncio.sleep(POLL_S)

    async def _look(self) -> Gauges | None:
        """Reads the server's metrics; None: they cannot be read, or the server is lost."""
        try:
            await self._server.ask("/health")
            return Gauges.read(await self._server.ask("/metrics"))
        except ValueError as error:
            log.warning("metrics that cannot be read", server=self._server.address, error=str(error))
        except (UnavailableError, RefusedError) as error:
            self._lost = UnavailableError(str(error) or f"{self._server.address} is not healthy")
            self._has_news.set()
        return None
