"""`baton top`: the full-screen live view."""

import asyncio
import sys
from typing import Annotated

import typer

from baton.cli.exit_codes import ExitCode, errors_reported, fail
from baton.cli.options import DEFAULT_ADDRESS, AddressOption, WaitOption
from baton.client import Client


def top(
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, metavar="SECONDS", help="Between two looks at the service.")
    ] = 1.0,
    timeout_s: WaitOption = 2.0,
    address: AddressOption = DEFAULT_ADDRESS,
) -> None:
    """Watch workers, queue, KV load, hit rate and tokens/s, full screen. q ends it, s and r sort."""
    if not sys.stdout.isatty():
        fail(ExitCode.USAGE, "`baton top` needs a terminal; `baton status --json` is for programs")
    with errors_reported():
        asyncio.run(_watch(address, interval_s, timeout_s))


async def _watch(address: str, interval_s: float, timeout_s: float) -> None:
    from baton.top.app import TopApp  # textual takes longer to import than most commands take to run

    async with Client(address) as client:
        await TopApp(lambda: client.status(timeout_s), address, interval_s).run_async()
