"""`baton models`: the models that a service serves."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import typer
from rich.table import Table

from baton.cli.terminal import options
from baton.cli.terminal.asking import OperatorsRouter
from baton.cli.terminal.exit_codes import errors_reported
from baton.cli.terminal.output import console, print_table
from baton.client.async_client import AsyncClient
from baton.client.service_status import Model, WorkerStatus
from baton.runs.access import Access

SUMS = ("blocks_used", "blocks_total", "running", "waiting")


def models(
    *,
    router: OperatorsRouter,
    api_key_file: options.ApiKeyFileOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """List the models with their workers and KV blocks."""
    with errors_reported():
        rows = asyncio.run(_ask(replace(router.access, api_key_file=api_key_file)))
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table("model", "aliases", "state", "workers")
    for header in ("blocks used/total", "running", "waiting", "longest request"):
        table.add_column(header, justify="right")
    for row in rows:
        workers = ", ".join(f"{count} {role} {state}" for (role, state), count in _counted(row["workers"]).items())
        table.add_row(
            row["id"],
            ", ".join(row["aliases"]),
            row["state"],
            workers or "none",
            f"{row['blocks_used']}/{row['blocks_total']}",
            *(str(row[name]) for name in ("running", "waiting", "max_model_len")),
        )
    print_table(console(), table)


async def _ask(access: Access) -> list[dict[str, Any]]:
    async with AsyncClient.through(access) as client:
        served, status = await asyncio.gather(
            client.models(options.STATUS_TIMEOUT_S), client.status(options.STATUS_TIMEOUT_S)
        )
    alone = len(served) == 1
    return [_row(one, [worker for worker in status.workers if alone or worker.model == one.id]) for one in served]


def _row(model: Model, workers: Sequence[WorkerStatus]) -> dict[str, Any]:
    decode = [worker for worker in workers if worker.role == "decode"]
    able, asleep = any(worker.used for worker in decode), any(worker.state == "sleeping" for worker in decode)
    sums = {name: sum(getattr(worker, name) for worker in workers) for name in SUMS}
    return (
        asdict(model)
        | {"state": "ready" if able else "asleep" if asleep else "not ready"}
        | sums
        | {"workers": [{name: getattr(worker, name) for name in ("worker_id", "role", "state")} for worker in workers]}
    )


def _counted(workers: Sequence[dict[str, str]]) -> Counter[tuple[str, str]]:
    return Counter((worker["role"], worker["state"]) for worker in workers)
