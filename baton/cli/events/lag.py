"""`baton events lag`: shows how far each worker's events have come."""

import asyncio
import json
from typing import Annotated, Any

import typer
from rich.table import Table

from baton.cli.events import options
from baton.cli.events.session import AtNats, until_stopped
from baton.cli.terminal.options import JsonOption
from baton.cli.terminal.output import console, counted, print_table
from baton.events.lag import LagMonitor, WorkerLag
from runtime.errors import DeadlineError, UnavailableError
from runtime.nats.client import NATS_ERRORS, NatsClient

WINDOW = "1m"
GAPS_SHOWN = 4


def lag(
    window_s: Annotated[
        Any,
        typer.Option(
            "--window",
            metavar="TIME",
            parser=options.parse_duration_s,
            help="How far back to count and to look for gaps.",
        ),
    ] = WINDOW,
    watch_s: Annotated[
        float | None, typer.Option("--watch", min=0.1, metavar="SECONDS", help="Show it again so often, until Ctrl-C.")
    ] = None,
    as_json: JsonOption = False,
    *,
    at: AtNats,
) -> None:
    """Show how far each worker's events have come: published, stored, missing."""

    async def work(nats: NatsClient) -> None:
        if watch_s is None:
            await _report_once(nats, window_s, as_json, at.timeout_s)
        else:
            await until_stopped(_watch(nats, window_s, watch_s, as_json, at.timeout_s))

    at.run(work)


async def _report_once(nats: NatsClient, window_s: float, as_json: bool, timeout_s: float) -> None:
    monitor = LagMonitor(nats, window_s)
    try:
        async with asyncio.timeout(timeout_s):
            await monitor.start(timeout_s / 2)
            await monitor.update()
    except TimeoutError as error:
        raise DeadlineError("reading the stream (a shorter --window is read sooner)", timeout_s) from error
    finally:
        await monitor.close()
    _show(monitor.report(), as_json)


async def _watch(nats: NatsClient, window_s: float, watch_s: float, as_json: bool, timeout_s: float) -> None:
    monitor = LagMonitor(nats, window_s)
    try:
        await monitor.start(timeout_s)
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    await nats.wait_connected()
                    await monitor.update()
            except NATS_ERRORS as error:
                raise UnavailableError(f"NATS has not answered for {timeout_s:g} s") from error
            _show(monitor.report(), as_json, again=True)
            await asyncio.sleep(watch_s)
    finally:
        await monitor.close()


def _show(workers: list[WorkerLag], as_json: bool, again: bool = False) -> None:
    if as_json:
        typer.echo(json.dumps({"workers": [_fields(worker) for worker in workers]}))
        return
    out = console()
    if again and out.is_terminal:
        out.clear()
    table = Table("worker", "role", "state", title=counted(len(workers), "worker"))
    for header in ("published", "stored", "behind", "missing ids", "last event", "events/s", "blocks cached/total"):
        table.add_column(header, justify="right")
    for worker in workers:
        table.add_row(
            worker.worker_id,
            worker.role,
            worker.state,
            _or_unknown(worker.published_id),
            str(worker.stored_id),
            _or_unknown(worker.behind),
            _gaps(worker.missing),
            f"{worker.age_s:.1f} s ago" if worker.age_s is not None else "never",
            f"{worker.events_per_s:.1f}",
            f"{_or_unknown(worker.blocks_cached)}/{_or_unknown(worker.blocks_total)}",
        )
    print_table(out, table)


def _fields(worker: WorkerLag) -> dict[str, Any]:
    return {
        "worker": worker.worker_id,
        "role": worker.role,
        "state": worker.state,
        "incarnation": worker.incarnation,
        "published_id": worker.published_id,
        "stored_id": worker.stored_id,
        "behind": worker.behind,
        "missing": [[hole.start, hole.stop - 1] for hole in worker.missing],
        "age_s": round(worker.age_s, 3) if worker.age_s is not None else None,
        "events_per_s": round(worker.events_per_s, 3),
        "blocks_cached": worker.blocks_cached,
        "blocks_total": worker.blocks_total,
    }


def _or_unknown(value: int | None) -> str:
    return "?" if value is None else str(value)


def _gaps(missing: list[range]) -> str:
    if not missing:
        return "none"
    shown = [str(hole.start) if len(hole) == 1 else f"{hole.start}-{hole.stop - 1}" for hole in missing[-GAPS_SHOWN:]]
    return f"{sum(map(len, missing))} ({', '.join(['...'] * (len(missing) > GAPS_SHOWN) + shown)})"
