"""`baton status`: the workers and the router's queue."""

import asyncio
import json

import typer
from rich.markup import escape
from rich.table import Table

from baton.cli.terminal import options
from baton.cli.terminal.access import Access
from baton.cli.terminal.answering import message_fields
from baton.cli.terminal.asking import asked
from baton.cli.terminal.exit_codes import errors_reported
from baton.cli.terminal.output import console, print_table
from baton_proto.generated import inference_pb2 as pb


def status(
    address: options.AddressOption = options.DEFAULT_ADDRESS,
    operator_key_file: options.OperatorKeyFileOption = None,
    ca_file: options.CaFileOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Show the workers and the router's queue."""
    access = Access(address, None, ca_file, operator_key_file)
    with errors_reported():
        response = asyncio.run(asked(access, lambda client: client.status(options.STATUS_TIMEOUT_S)))
    if as_json:
        fields = {
            "router_id": response.router_id,
            "workers": [message_fields(worker) for worker in response.workers],
            "queue": message_fields(response.queue),
            "totals": message_fields(response.totals),
        }
        typer.echo(json.dumps(fields))
    else:
        _show(response)


def _show(response: pb.StatusResponse) -> None:
    out = console()
    table = Table("worker", "role", "state", title=f"{response.router_id}: {len(response.workers)} workers")
    tiered = any(worker.host_blocks_total for worker in response.workers)
    for header in ("blocks used/total", "cached + host" if tiered else "cached", "running", "waiting", "leases"):
        table.add_column(header, justify="right")
    for worker in response.workers:
        table.add_row(
            worker.worker_id,
            worker.role,
            worker.state,
            f"{worker.blocks_used}/{worker.blocks_total}",
            f"{worker.blocks_cached} + {worker.host_blocks_used}" if tiered else str(worker.blocks_cached),
            *map(str, (worker.running, worker.waiting, worker.leases)),
        )
    print_table(out, table)
    for worker in response.workers:
        if worker.note:
            out.print(f"[bold red]{worker.worker_id}[/]: {escape(worker.note)}")
    queue = response.queue
    oldest = f", the oldest for {queue.oldest_age_s:.1f} s" if queue.waiting else ""
    out.print(f"queue: {queue.running} running, {queue.waiting} waiting{oldest}; room for {queue.capacity}")
