"""The page's figures of all routers of a service: each asks the others for theirs once a second, and adds them up."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from heapq import merge
from itertools import islice
from typing import Final

import msgspec

from baton_proto.decoding import decoder
from baton_proto.routers.page_part import MAJOR, PagePart, decode_page_part, encode_page_part
from baton_proto.routers.router_report import BUCKETS, RouterTotals
from baton_proto.token_counts import TokenCounts
from router.counters.metrics import RouterMetrics
from router.requests.admission import AdmissionQueue, QueueView
from router.siblings import Siblings
from router.ui.requests import LISTED, RequestLine, RequestViews
from runtime.discovery.worker_key import new_incarnation

QUESTION: Final = "page"
WATCHED: Final = b"watched"
STORY: Final = "story"

_encode_story = msgspec.json.Encoder().encode
_encode_lines = msgspec.msgpack.Encoder().encode
_decode_lines = decoder(list[RequestLine])


class PageParts:
    def __init__(
        self, router_id: str, queue: AdmissionQueue, metrics: RouterMetrics, requests: RequestViews, siblings: Siblings
    ) -> None:
        self._router_id = router_id
        self._incarnation = new_incarnation()
        self._queue = queue
        self._metrics = metrics
        self._requests = requests
        self._siblings = siblings

    async def start(self) -> None:
        async def answer(payload: bytes) -> bytes:
            return encode_page_part(self.own(watched=payload == WATCHED))

        async def tell(request_id: bytes) -> bytes:
            return self._own_story(request_id.decode())

        await self._siblings.answer(QUESTION, answer)
        await self._siblings.answer(STORY, tell)

    def own(self, *, watched: bool) -> PagePart:
        view, metrics = self._queue.view(), self._metrics
        flows = [(key[0], flow) for key, flow in (metrics.flows.items() if watched else ())]
        lines = _encode_lines(self._requests.lines()) if watched else b""
        return PagePart(
            version=MAJOR,
            router_id=self._router_id,
            incarnation=self._incarnation,
            waiting=view.waiting,
            running=view.running,
            capacity=view.capacity,
            oldest_s=view.oldest_age_s,
            totals=metrics.totals,
            streamed_tokens=metrics.streamed_tokens,
            flows=flows,
            lines=lines,
        )

    async def all(self, *, watched: bool) -> list[PagePart]:
        """Of all routers, this one first."""
        parts = [self.own(watched=watched)]
        for answer in await self._siblings.ask(QUESTION, WATCHED if watched else b""):
            try:
                parts.append(decode_page_part(answer))
            except msgspec.DecodeError:
                continue  # another release's
        return parts

    async def story(self, request_id: str) -> bytes:
        """As JSON, by whichever router remembers the request; empty: none does."""
        if story := self._own_story(request_id):
            return story
        return next(iter(await self._siblings.ask(STORY, request_id.encode())), b"")

    def _own_story(self, request_id: str) -> bytes:
        story = self._requests.story(request_id)
        return b"" if story is None else _encode_story(story)


def queue_of(parts: Sequence[PagePart]) -> QueueView:
    waiting, running, capacity = (
        sum(getattr(part, name) for part in parts) for name in ("waiting", "running", "capacity")
    )
    return QueueView(waiting, running, capacity, max(part.oldest_s for part in parts))


def totals_of(parts: Sequence[PagePart]) -> RouterTotals:
    """What the curves need of them."""
    ttft, itl = ([sum(column) for column in zip(*rows, strict=True)] for rows in _histograms(parts))
    counted = {name: sum(getattr(part.totals, name) for part in parts) for name in ("arrivals", "input_tokens")}
    return RouterTotals(**counted, ttft=ttft, itl=itl)


def flows_of(parts: Sequence[PagePart]) -> Mapping[str, TokenCounts]:
    """By worker id."""
    sums: defaultdict[str, TokenCounts] = defaultdict(TokenCounts)
    for part in parts:
        for worker_id, flow in part.flows:
            sums[worker_id].add(flow)
    return sums


def lines_of(parts: Sequence[PagePart]) -> list[RequestLine]:
    """The last requests of all, the newest first."""
    each = []
    for part in parts:
        try:
            each.append(_decode_lines(part.lines) if part.lines else [])
        except msgspec.DecodeError:
            continue
    return list(islice(merge(*each, key=lambda line: -line.time_s), LISTED))


def _histograms(parts: Sequence[PagePart]) -> tuple[list[list[int]], list[list[int]]]:
    """Two of each part, of BUCKETS counts."""
    rows = [(part.totals.ttft, part.totals.itl) for part in parts]
    able = [(ttft, itl) for ttft, itl in rows if len(ttft) == len(itl) == BUCKETS]
    return [ttft for ttft, _ in able], [itl for _, itl in able]
