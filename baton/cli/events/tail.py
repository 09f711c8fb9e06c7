"""`baton events tail`: shows the events as they are stored, one line each."""

import enum
import json
import sys
import time
from collections.abc import Callable
from typing import Annotated

import typer

from baton.cli.events import options
from baton.cli.events.session import AtNats, until_stopped
from baton.cli.terminal.options import JsonOption
from baton.events.event_line import EventLine
from baton.events.event_log import EventLog, StoredBatch
from baton_proto.kv_events import DEVICE, HOMES
from runtime.nats.client import NatsClient
from runtime.nats.subjects import ANY

RATES_S = 5.0


class EventType(enum.StrEnum):
    STORED = "stored"
    REMOVED = "removed"
    MOVED = "moved"
    CLEARED = "cleared"


def tail(
    worker: options.WorkerOption = None,
    kind: Annotated[EventType | None, typer.Option("--type", help="Only events of this type.")] = None,
    since: options.SinceOption = None,
    from_start: options.FromStartOption = False,
    rates: Annotated[
        float, typer.Option("--rates", min=0, metavar="SECONDS", help="Sum up in between so often; 0 never.")
    ] = RATES_S,
    for_s: options.ForOption = None,
    as_json: JsonOption = False,
    *,
    at: AtNats,
) -> None:
    """Show what the workers store in their KV caches and drop from them, as it happens."""
    start = options.start_position(since, from_start)
    view = TailView(kind, as_json, rates)

    async def work(nats: NatsClient) -> None:
        log = EventLog(nats, worker or ANY)
        await log.seek(start)
        await until_stopped(view.follow(log, at.timeout_s), for_s)

    at.run(work)


class TailView:
    def __init__(self, kind: EventType | None, as_json: bool, rates_s: float) -> None:
        self._kind = kind
        self._format: Callable[[EventLine], str] = _json_line if as_json else _PeopleFormat().line
        self._rates = _Rates(rates_s) if rates_s and not as_json else None

    async def follow(self, log: EventLog, timeout_s: float) -> None:
        async for batches in log.follow(timeout_s):
            self.show(batches)

    def show(self, batches: list[StoredBatch]) -> None:
        lines = self._lines(batches)
        if self._rates is not None and (summary := self._rates.due()):
            lines.append(summary)
        if lines:
            sys.stdout.write("\n".join(lines) + "\n")
            sys.stdout.flush()

    def _lines(self, batches: list[StoredBatch]) -> list[str]:
        lines = []
        for stored in batches:
            for event in stored.batch.events:
                line = EventLine.of(stored.batch, event)
                if self._kind is None or line.kind == self._kind:
                    lines.append(self._format(line))
                    if self._rates is not None:
                        self._rates.count(line)
        return lines


def _json_line(line: EventLine) -> str:
    fields = {
        "time_s": line.time_s,
        "worker": line.worker_id,
        "incarnation": line.incarnation,
        "id": line.event_id,
        "type": line.kind,
        "blocks": line.num_blocks,
        "parent": line.parent,
        "first": line.first,
        "home": line.home,
    }
    return json.dumps(fields)


class _PeopleFormat:
    def __init__(self) -> None:
        self._second = -1
        self._clock = ""

    def line(self, line: EventLine) -> str:
        second = int(line.time_s)
        if second != self._second:
            self._second, self._clock = second, time.strftime("%H:%M:%S", time.localtime(second))
        text = (
            f"{self._clock}.{int((line.time_s - second) * 1000):03d}  {line.worker_id:<16} #{line.event_id:<8} "
            f"{line.kind:<7}"
        )
        if line.kind == "cleared":
            return text.rstrip()
        text += f" {line.num_blocks:>6} block{'s' if line.num_blocks != 1 else ' '}  first {line.first[:8]}"
        if line.kind == "stored":
            text += f"  after {line.parent[:8]}" if line.parent is not None else "  at the start"
        if line.home not in (None, HOMES[DEVICE]) or line.kind == "moved":
            text += f"  {'to' if line.kind == 'moved' else 'on'} {line.home}"
        return text


class _Rates:
    """Counts the events that were shown since the last summary."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._begin()

    def count(self, line: EventLine) -> None:
        self._events += 1
        self._workers.add(line.worker_id)
        self._blocks[line.kind] = self._blocks.get(line.kind, 0) + line.num_blocks

    def due(self) -> str:
        """The next summary; empty when it is not yet time for it, or nothing has happened."""
        passed_s = time.monotonic() - self._since_s
        if passed_s < self._interval_s:
            return ""
        summary = ""
        if self._events:
            stored, removed = (self._blocks.get(kind, 0) / passed_s for kind in ("stored", "removed"))
            summary = (
                f"-- {self._events / passed_s:.1f} events/s, {stored:.1f} blocks/s stored, {removed:.1f} blocks/s "
                f"removed, {len(self._workers)} worker{'s' if len(self._workers) != 1 else ''}"
            )
        self._begin()
        return summary

    def _begin(self) -> None:
        self._events = 0
        self._blocks: dict[str, int] = {}
        self._workers: set[str] = set()
        self._since_s = time.monotonic()
