"""What the indexer knows of one worker's events: how far the tree has come with them, and what is wrong."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from enum import Enum

import structlog

from baton_proto.discovery import WorkerLoad
from baton_proto.worker import SnapshotChunk
from runtime.discovery.worker_key import WorkerKey
from runtime.kv_events.feed import EventFeed

LAG_S = 1.0  # how long the tree may lag behind what a worker says it published
HEAL_WAIT_MAX_S = 5.0
SILENT_S = 5.0  # a worker may cache blocks for this long without publishing anything

SILENT_NOTE = "caches blocks but publishes no events: requests reach it by load alone"

FetchSnapshot = Callable[[str, int], AsyncIterator[SnapshotChunk]]
"""(worker id, incarnation) -> the worker's block table. May raise anything; it is called again later."""

log = structlog.get_logger()


class State(Enum):
    """What the tree's part of one worker is worth. Healing (router/index/healing.py) leads back to FOLLOWING."""

    FOLLOWING = "batches are applied as they come"
    HOLED = "batches are missing; the stream is asked for them"
    STALE = "only a snapshot can make the tree right; until it is taken, batches are applied as they come"
    FILLING = "the tree is filled from a snapshot; batches wait for its end"


class FollowedWorker:
    """One incarnation of a worker."""

    def __init__(self, key: WorkerKey, fetch_snapshot: FetchSnapshot) -> None:
        self.key = key
        self.fetch_snapshot = fetch_snapshot
        self.feed = EventFeed()
        self.state = State.STALE
        self.batches = 0  # applied, without those that a snapshot stood for
        self.gaps = 0  # holes in the event ids
        self.followers: list[Callable[[int], None]] = []  # told each event id that the tree has come to
        self.silent = False  # the worker caches blocks and publishes nothing
        self.trouble = ""  # why healing fails
        self.healing: asyncio.Task[None] | None = None
        self.heal_not_before_s = 0.0  # monotonic
        self._heal_wait_s = LAG_S
        self._late: tuple[int, float] | None = None  # event id that should have arrived, since when (monotonic)
        self._silent_since_s: float | None = None  # monotonic

    @property
    def lag(self) -> int:
        """Batches that the worker has published and that the tree does not contain."""
        return max(0, self.feed.expected - self.feed.applied)

    @property
    def contained(self) -> int | None:
        """The event up to which the tree has what the worker had; None while only a snapshot can tell."""
        return self.feed.applied if self.state in (State.FOLLOWING, State.HOLED) else None

    @property
    def settled(self) -> bool:
        """The tree contains all that the worker is known to have published."""
        return self.contained is not None and not self.feed.behind

    @property
    def note(self) -> str:
        """What an operator should know; empty when all is well."""
        if self.silent:
            return SILENT_NOTE
        if self.trouble:
            return self.trouble
        match self.state:
            case State.FOLLOWING:
                return ""
            case State.HOLED:
                return f"behind: event {self.feed.applied} of {self.feed.expected}"
            case State.STALE | State.FILLING:
                return "a snapshot is being taken"

    def come_to(self, event_id: int) -> None:
        """Tells the followers that the tree has applied `event_id`."""
        for seen in self.followers:
            seen(event_id)

    def expect(self, event_id: int) -> None:
        """The worker says that it has published batches up to `event_id`."""
        self.feed.expected = max(self.feed.expected, event_id)

    def observe(self, load: WorkerLoad) -> None:
        self.expect(load.last_event_id)
        if load.last_event_id or not load.blocks_cached:
            self._silent_since_s, self.silent = None, False
        elif self._silent_since_s is None:
            self._silent_since_s = time.monotonic()
        elif not self.silent and time.monotonic() - self._silent_since_s > SILENT_S:
            self.silent = True
            log.warning("worker publishes no events", worker=self.key[0], incarnation=self.key[1], note=SILENT_NOTE)

    def lags(self) -> bool:
        """Whether a batch has been missing for more than LAG_S since it was known to be published."""
        if not self.feed.behind or (self._late is not None and self.feed.applied >= self._late[0]):
            self._late = None
        if self.feed.behind and self._late is None:
            self._late = (self.feed.expected, time.monotonic())
        return self._late is not None and time.monotonic() - self._late[1] > LAG_S

    def postpone_healing(self) -> None:
        """Events that keep contradicting themselves, or do not come at all, must not keep the router busy."""
        self._late = None
        self.heal_not_before_s = time.monotonic() + self._heal_wait_s
        self._heal_wait_s = min(2 * self._heal_wait_s, HEAL_WAIT_MAX_S)

    def reset_heal_wait(self) -> None:
        """A batch was applied without contradiction: the next postponement is the shortest again."""
        self._heal_wait_s = LAG_S
