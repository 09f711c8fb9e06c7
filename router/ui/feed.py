"""The stream behind the page: once a second one message, encoded once, however many watch.

A viewer that begins, or that has read too slowly to follow, gets everything; the others get what has changed. Because a
viewer only remembers which message it has seen, it costs the router no memory. Places are few: a viewer that reads
nothing, or else has watched longest, leaves for who comes. While nobody watches, only the curves go on.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import structlog
from msgspec import UNSET, Struct, UnsetType

from router.counters.recent import Recent
from router.requests.admission import QueueView
from router.ui.history import History, Point
from router.ui.parts import PageParts, flows_of, lines_of, queue_of, totals_of
from router.ui.planner import Decision, PlannerWatch
from router.ui.requests import RequestLine
from router.ui.workers import WorkerRow, WorkerRows
from router.workers.pool import WorkerPool
from runtime.end_task import end_tasks

INTERVAL_S: Final = 1.0
PLANNER_S: Final = 2.0  # between two questions to the planner
KEPT: Final = 8  # messages that a slow viewer may be behind
MAX_VIEWERS: Final = 32
SETTLED_S: Final = 60.0  # for which a viewer keeps its place, if it reads
MAX_PAIRS: Final = 200  # of workers with transfers, in one message

Transfer = tuple[str, str, str, int, int]
"""Prefill worker, decode worker, transport, how many, bytes."""

log = structlog.get_logger()
_encode = msgspec.json.Encoder().encode


class Update(Struct, omit_defaults=True):
    """The news since the last message; with `about`, all that is known."""

    time_s: float
    queue: QueueView
    workers: list[WorkerRow] = []
    gone: list[str] = []
    points: list[Point] = []
    transfers: list[Transfer] = []
    decisions: list[Decision] = []
    plan: Decision | None = None
    no_plan: str = ""  # why there is no newer one
    requests: list[RequestLine] | UnsetType = UNSET  # unset: as before
    about: dict[str, Any] | None = None


@dataclass(slots=True, eq=False)
class _Viewer:
    drop: Callable[[], object]  # closes its connection
    seen: int  # number of the last message
    since_s: float


class Feed:
    def __init__(
        self,
        about: dict[str, Any],
        pool: WorkerPool,
        parts: PageParts,
        recent: Recent,
        workers: WorkerRows,
        planner: PlannerWatch,
    ) -> None:
        """`about`: what never changes, for the page."""
        fields = {"workers": WorkerRow, "points": Point, "requests": RequestLine}
        self._about = about | {"fields": {name: kind.__struct_fields__ for name, kind in fields.items()}}
        self._pool = pool
        self._parts = parts
        self._recent = recent
        self._workers = workers
        self._planner = planner
        self._history = History()
        self._decided_s = 0.0  # time of the last decision that was told
        self._viewers: list[_Viewer] = []  # the longest here first
        self._number = 0  # of the last message
        self._kept: deque[bytes] = deque(maxlen=KEPT)
        self._whole = b""  # all that is known at the last message; empty: nobody has asked for it
        self._last = Update(0.0, queue_of([parts.own(watched=False)]))
        self._lines: list[RequestLine] = []
        self._told = asyncio.Event()  # set with the next message
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    async def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._repeat(INTERVAL_S, self._tick), name="the live page"),
            asyncio.create_task(self._repeat(PLANNER_S, self._ask_planner), name="the live page's planner"),
        ]

    async def close(self) -> None:
        """Ends the viewers' streams too."""
        self._closed = True
        await end_tasks(*self._tasks)
        self._told.set()

    @property
    def full(self) -> bool:
        return len(self._viewers) >= MAX_VIEWERS

    def make_room(self) -> bool:
        """Drops one viewer; False: all of them read, and have come just now."""
        if not self._viewers:
            return False
        last = min(self._viewers, key=lambda viewer: viewer.seen)
        if self._number - last.seen <= KEPT:
            last = self._viewers[0]
            if time.monotonic() < last.since_s + SETTLED_S:
                return False
        self._viewers.remove(last)
        last.drop()
        return True

    async def messages(self, drop: Callable[[], object] = lambda: None) -> AsyncGenerator[bytes, None]:
        """Yields messages to one viewer: first all that is known, then what is new. Ends when the router does. `drop`
        closes the viewer's connection."""
        viewer = _Viewer(drop, self._number - KEPT, time.monotonic())
        self._viewers.append(viewer)
        try:
            told = self._told
            while True:
                await told.wait()
                if self._closed:
                    return
                missed, viewer.seen, told = self._number - viewer.seen, self._number, self._told
                yield self._everything() if missed > KEPT else b"".join(list(self._kept)[-missed:])
        finally:
            if viewer in self._viewers:
                self._viewers.remove(viewer)

    async def _repeat(self, interval_s: float, step: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await step()
            except Exception:
                log.exception("the live page misses a moment")
            await asyncio.sleep(interval_s)

    async def _ask_planner(self) -> None:
        if self._viewers:
            await self._planner.look()
        else:
            self._planner.last = None

    async def _tick(self) -> None:
        watched = bool(self._viewers)  # who comes from here on waits for the next message
        parts = await self._parts.all(watched=watched)
        changed, gone = await self._workers.changes(flows_of(parts)) if watched else ([], [])
        transfers = self._transfers()
        queue, now_s = queue_of(parts), time.time()
        point = self._history.sample(
            now_s,
            time.monotonic(),
            totals_of(parts),
            sum(part.streamed_tokens for part in parts),
            sum(transfer[-1] for transfer in transfers),
            queue,
            (len(self._pool.prefill_keys()), len(self._pool.decode_keys())),
            self._planner.wanted,
            {(part.router_id, part.incarnation) for part in parts},
        )
        if not watched:
            return
        lines = lines_of(parts)
        self._last = Update(
            round(now_s, 3),
            queue,
            changed,
            gone,
            [] if point is None else [point],
            transfers,
            [decision for decision in self._planner.decisions if decision.time_s > self._decided_s],
            self._planner.last,
            self._planner.problem,
            UNSET if lines == self._lines else lines,
        )
        self._lines, self._decided_s = lines, max((one.time_s for one in self._planner.decisions), default=0.0)
        self._tell()

    def _tell(self) -> None:
        self._number += 1
        self._kept.append(_event(self._last))
        self._whole = b""
        told, self._told = self._told, asyncio.Event()
        told.set()

    def _everything(self) -> bytes:
        if not self._whole:
            everything = msgspec.structs.replace(
                self._last,
                workers=list(self._workers.rows.values()),
                points=list(self._history.points),
                decisions=list(self._planner.decisions),
                requests=self._lines,
                about=self._about,
            )
            self._whole = _event(everything)
        return self._whole

    def _transfers(self) -> list[Transfer]:
        """Transfers of this router's requests since the last call, by pair of workers, the most bytes first."""
        number: Counter[tuple[str, str, str]] = Counter()
        num_bytes: Counter[tuple[str, str, str]] = Counter()
        for decode_worker, handoff in self._recent.take_handoffs():
            pair = (handoff.prefill_worker, decode_worker, handoff.transport)
            number[pair] += 1
            num_bytes[pair] += handoff.kv_bytes
        return [(*pair, number[pair], moved) for pair, moved in num_bytes.most_common(MAX_PAIRS)]


def _event(update: Update) -> bytes:
    return b"data: %b\n\n" % _encode(update)
