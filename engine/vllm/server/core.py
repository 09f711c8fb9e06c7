"""The requests under way at one rank of a vLLM server, behind the names of vLLM's own core: each is a stream of HTTP.

Invariant: when the server is lost, `get_output_async` raises before a broken stream ends its request. Hence no request
goes to a lost server again.
"""

import asyncio
import time
from dataclasses import dataclass, field
from types import SimpleNamespace, TracebackType
from typing import Final, Self

from engine.vllm.engine import FINISHES
from engine.vllm.server.completion import END, Completion, Item, item_of, whole_item_of
from engine.vllm.server.gauges import Gauges
from engine.vllm.server.image_prompt import NOT_THERE
from engine.vllm.server.ranks import Rank
from engine.vllm.server.server import RefusedError, VllmServer
from engine.vllm.server.watch import ServerWatch
from runtime.end_task import end_tasks
from runtime.errors import BatonError

WRONG_REQUEST: Final = (400, 413, 422)  # statuses of a server that cannot serve this request, and others well
CUT_SHORT: Final = "the answer stops before its end"


@dataclass(slots=True)
class News:
    """What has come since the last news, with the names that vLLM's core gives it."""

    outputs: list[Item] = field(default_factory=list)
    scheduler_stats: SimpleNamespace | None = None
    timestamp: float = field(default_factory=time.monotonic)


class ServerCore:
    """A context, which ends the requests. Event loop only."""

    def __init__(self, server: VllmServer, watch: ServerWatch, rank: Rank) -> None:
        self._server = server
        self._watch = watch
        self._headers = rank.headers
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._news = News()
        self._has_news = asyncio.Event()
        self._gauges: Gauges | None = None
        watch.tell(rank.number, self._looked)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await end_tasks(*self._streams.values())

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
        if self._watch.lost is not None:
            raise self._watch.lost
        self._has_news.clear()
        news, self._news = self._news, News()
        news.timestamp = time.monotonic()
        return news

    async def _follow(self, completion: Completion) -> None:
        last = Item(completion.request_id)
        try:
            if completion.streams:
                # To its end, which comes with END: a connection that is left before cannot take another request.
                async for data in self._server.stream(completion.path, completion.body, self._headers):
                    if data == END:
                        continue
                    last = item_of(completion, data)
                    if last.finish_reason is None or last.finish_reason in FINISHES:
                        self._tell(last)
            else:
                data = await self._server.ask(completion.path, completion.body, self._headers, is_patient=True)
                # On a thread, because log-probabilities of a prompt are megabytes.
                self._tell(last := await asyncio.to_thread(whole_item_of, completion, data))
        except (BatonError, RefusedError) as error:
            wrong = WRONG_REQUEST + NOT_THERE * bool(completion.num_images or completion.adapter)
            refused = isinstance(error, RefusedError) and error.status in wrong
            last = Item(completion.request_id, finish_reason=str(error), refused=refused)
        if last.finish_reason not in FINISHES:
            await self._watch.look()
            reason = last.finish_reason or CUT_SHORT
            self._tell(Item(completion.request_id, finish_reason=reason, refused=last.refused))

    def _tell(self, item: Item) -> None:
        self._news.outputs.append(item)
        self._has_news.set()

    def _looked(self, gauges: Gauges | None) -> None:
        if gauges is not None:
            self._news.scheduler_stats, self._gauges = gauges.stats(self._gauges), gauges
        self._has_news.set()
