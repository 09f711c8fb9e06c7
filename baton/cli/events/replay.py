"""`baton events replay`: publishes a recording to the routers of a NATS server."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from baton.cli.events.session import AtNats, until_stopped
from baton.cli.terminal.exit_codes import errors_reported
from baton.cli.terminal.output import counted
from baton.events.recording import Recording
from baton.events.replayer import Replayer
from runtime.end_task import end_tasks
from runtime.nats.client import NatsClient

PROGRESS_S = 0.25


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="As `baton events record` has written it.")],
    speed: Annotated[
        float | None, typer.Option("--speed", min=0.001, metavar="X", help="Times as fast as recorded. [default: 1]")
    ] = None,
    at_once: Annotated[bool, typer.Option("--max", help="As fast as NATS takes it.")] = False,
    hold: Annotated[
        bool, typer.Option("--hold", help="Keep the replayed workers in the routers' trees until Ctrl-C.")
    ] = False,
    prefix: Annotated[str, typer.Option("--prefix", metavar="TEXT", help="To stand before every worker id.")] = "",
    *,
    at: AtNats,
) -> None:
    """Publish a recording, so that routers index it. The replayed workers get no requests, and leave at the end."""
    if at_once and speed is not None:
        raise typer.BadParameter("--speed and --max exclude each other")

    with errors_reported():
        recording = Recording(file)

    async def work(nats: NatsClient) -> None:
        replayer = Replayer(nats, recording, None if at_once else speed or 1.0, prefix, at.timeout_s)
        try:
            if await until_stopped(_replay(replayer, recording)):
                _tell(replayer, recording)
                if hold:
                    await until_stopped(_for_ever(), said="the workers stay until Ctrl-C")
        finally:
            await replayer.close()

    at.run(work)


async def _replay(replayer: Replayer, recording: Recording) -> None:
    with Progress(console=Console(stderr=True), disable=not Console(stderr=True).is_terminal) as progress:
        bar = progress.add_task(recording.path.name, total=recording.num_bytes)
        work = asyncio.create_task(replayer.run())
        try:
            while not work.done():
                await asyncio.wait([work], timeout=PROGRESS_S)
                progress.update(bar, completed=recording.bytes_read)
            work.result()
        finally:
            await end_tasks(work)


async def _for_ever() -> None:
    await asyncio.Event().wait()


def _tell(replayer: Replayer, recording: Recording) -> None:
    events, batches = counted(replayer.num_events, "event"), counted(replayer.num_batches, "batch")
    typer.echo(f"{recording.path}: {events} in {batches} replayed")
    if recording.damage:
        typer.echo(f"warning: {recording.damage}; what comes before it was replayed", err=True)
    elif not recording.ended_in_order:
        typer.echo("warning: the recording was not ended in order; its last moments may be missing", err=True)
