"""`baton events record`: writes the event stream into a file."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.events import options
from baton.cli.events.session import AtNats, until_stopped
from baton.cli.terminal.output import counted, human_bytes
from baton.events.recorder import Recorder
from baton.events.recording import RecordingWriter
from runtime.nats.client import NatsClient


def record(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="To be created.")],
    since: options.SinceOption = None,
    from_start: options.FromStartOption = False,
    for_s: options.ForOption = None,
    *,
    at: AtNats,
) -> None:
    """Record all workers' events until Ctrl-C, on top of the blocks that they hold already."""
    start = options.start_position(since, from_start)

    async def work(nats: NatsClient) -> None:
        with RecordingWriter(file, nats.namespace) as writer:
            recorder = Recorder(nats, writer, at.timeout_s, at.keys().cluster)
            try:
                await recorder.start(start)
                await until_stopped(recorder.run(), for_s, said=f"recording into {file}")
                async with asyncio.timeout(at.timeout_s):
                    await recorder.catch_up()
            finally:
                await recorder.close()
        _tell(recorder, writer, file)

    at.run(work)


def _tell(recorder: Recorder, writer: RecordingWriter, file: Path) -> None:
    typer.echo(
        f"{file}: {counted(recorder.num_events, 'event')} in {counted(recorder.num_batches, 'batch')} "
        f"of {counted(recorder.num_workers, 'worker')}, "
        f"{human_bytes(writer.bytes_written)}"
    )
    for worker_id, _ in sorted(recorder.without_base):
        typer.echo(f"warning: blocks that {worker_id} held before are not in the recording", err=True)
