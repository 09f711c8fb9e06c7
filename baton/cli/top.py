"""`baton top`: the full-screen live view."""

import asyncio
import sys
from typing import Annotated

import grpc
import typer

from baton.cli.terminal.asking import OperatorsRouter
from baton.cli.terminal.exit_codes import ExitCode, errors_reported, fail
from baton.cli.terminal.options import WaitOption
from baton.runs.access import Access
from runtime.errors import ConfigError, UnauthorizedError


def top(
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, metavar="SECONDS", help="Between two looks at the service.")
    ] = 1.0,
    timeout_s: WaitOption = 2.0,
    *,
    router: OperatorsRouter,
) -> None:
    """Watch workers, queue, KV load, hit rate and tokens/s, full screen. q ends it, s and r sort."""
    if not sys.stdout.isatty():
        fail(ExitCode.USAGE, "`baton top` needs a terminal; `baton status --json` is for programs")
    with errors_reported():
        asyncio.run(_watch(router.access, interval_s, timeout_s))


async def _watch(access: Access, interval_s: float, timeout_s: float) -> None:
    from baton.cli.top_view.app import TopApp  # textual takes longer to import than most commands take to run

    async with access.client() as client:
        try:
            await client.status(timeout_s)
        except grpc.aio.AioRpcError as error:  # what no waiting mends is said before the screen is taken
            meaning = await access.meaning(error)
            if isinstance(meaning, ConfigError | UnauthorizedError):
                raise meaning from error
        await TopApp(lambda: client.status(timeout_s), access.place, interval_s).run_async()
