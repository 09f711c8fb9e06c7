"""`baton ui`: the way to the live page."""

import asyncio
import html
import tempfile
import time
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.terminal import options
from baton.cli.terminal.asking import OperatorsRouter
from baton.cli.terminal.exit_codes import ExitCode, errors_reported, fail
from baton.runs.access import Access
from baton.runs.run_file import THIS_MACHINE, run_at
from runtime.address import format_address, parse_address
from runtime.errors import ConfigError

READING_S = 5.0  # that a browser has to read the file which sends it on


def ui(
    show: Annotated[bool, typer.Option("--open", help="Show it in a browser instead.")] = False,
    url: Annotated[
        str | None,
        typer.Option(metavar="http://HOST:PORT", help="Of a router elsewhere. [default: the one that runs here]"),
    ] = None,
    *,
    router: OperatorsRouter,
) -> None:
    """Print a link to the live page: workers, transfers, queue, latencies, planner, requests, prefixes.

    The link brings the operator key along, behind a #, which is never sent. The page keeps it until it is closed.
    """
    access = router.access
    with errors_reported():
        page = f"{url.rstrip('/') if url else asyncio.run(_router(access))}/ui"
        key = access.operators_key()
    link = page if key is None else f"{page}#key={key.reveal()}"
    if not show:
        typer.echo(link)
    elif _shown(link):
        typer.echo(f"opened {page}")
    else:
        fail(ExitCode.FAILED, "no browser was found; without --open the link is printed, for any browser")


async def _router(access: Access) -> str:
    """The URL of the router's HTTP API. Raises what a question to the router does."""
    async with access.client() as client:
        await client.status(options.STATUS_TIMEOUT_S)  # the key is right
    run = await asyncio.to_thread(run_at, access.place)
    if run is None or not run.file.http:
        raise ConfigError("--url", f"where the router at {access.place} speaks HTTP is not known here: name it")
    host, port = parse_address(run.file.http)
    return f"{'https' if access.ca_file else 'http'}://{format_address(THIS_MACHINE.get(host, host), port)}"


def _shown(link: str) -> bool:
    """A file that only this user can read brings the link to the browser: a command line is open to all."""
    with tempfile.TemporaryDirectory(prefix="baton-ui-") as folder:
        file = Path(folder) / "ui.html"
        file.write_text(f'<meta http-equiv="refresh" content="0;url={html.escape(link)}">')
        opened = webbrowser.open(file.as_uri())
        if opened:
            time.sleep(READING_S)
    return opened
