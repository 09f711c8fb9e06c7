"""`baton status`: the workers and the routers' queue."""

import asyncio
import json
from dataclasses import asdict

import typer
from rich.markup import escape
from rich.table import Table

from baton.cli.terminal import options
from baton.cli.terminal.asking import OperatorsRouter
from baton.cli.terminal.exit_codes import errors_reported
from baton.cli.terminal.output import console, counted, print_table
from baton.client.async_client import AsyncClient
from baton.client.service_status import Status
from baton.runs.access import Access

TIERS = ("host", "disk")


def status(
    model: options.OfModelOption = "",
    *,
    router: OperatorsRouter,
    as_json: options.JsonOption = False,
) -> None:
    """Show the workers and the routers' queue."""
    with errors_reported():
        response = asyncio.run(_ask(router.access, model))
    if as_json:
        typer.echo(json.dumps(asdict(response)))
    else:
        _show(response)


async def _ask(access: Access, model: str) -> Status:
    async with AsyncClient.through(access) as client:
        return await client.status(options.STATUS_TIMEOUT_S, model)


def _show(response: Status) -> None:
    out = console()
    is_mixed = len({worker.engine for worker in response.workers}) > 1
    has_models = any(worker.model for worker in response.workers)
    pools = any(worker.serves for worker in response.workers)
    table = Table(
        "worker",
        *["model"] * has_models,
        "role",
        *["engine"] * is_mixed,
        *["serves"] * pools,
        "state",
        title=f"{', '.join(response.routers)}: {counted(len(response.workers), 'worker')}",
    )
    tiers = [tier for tier in TIERS if any(getattr(worker, f"{tier}_blocks_total") for worker in response.workers)]
    for header in ("blocks used/total", " + ".join(("cached", *tiers)), "running", "waiting", "leases"):
        table.add_column(header, justify="right")
    for worker in response.workers:
        table.add_row(
            worker.worker_id,
            *[worker.model] * has_models,
            worker.role,
            *[worker.engine] * is_mixed,
            *[worker.serves or "text"] * pools,
            worker.state,
            f"{worker.blocks_used}/{worker.blocks_total}",
            " + ".join(map(str, (worker.blocks_cached, *(getattr(worker, f"{tier}_blocks_used") for tier in tiers)))),
            *map(str, (worker.running, worker.waiting, worker.leases)),
        )
    print_table(out, table)
    for worker in response.workers:
        if worker.note:
            out.print(f"[bold red]{worker.worker_id}[/]: {escape(worker.note)}")
    queue = response.queue
    oldest = f", the oldest for {queue.oldest_age_s:.1f} s" if queue.waiting else ""
    out.print(f"queue: {queue.running} running, {queue.waiting} waiting{oldest}; room for {queue.capacity}")
