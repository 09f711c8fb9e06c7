"""`baton events record`: the stream into a file."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.events.options import (
    DEFAULT_NATS_URL,
    DEFAULT_TIMEOUT_S,
    EventsTimeoutOption,
    ForOption,
    FromStartOption,
    NamespaceOption,
    NatsUrlOption,
    SinceOption,
    start_position,
)
from baton.cli.events.session import nats_session, until_stopped
from baton.cli.exit_codes import errors_reported
from baton.cli.output import human_bytes
from baton.events.event_source import discovery_ttl_s
from baton.events.recorder import Recorder
from baton.events.recording import RecordingWriter
from runtime.security.key_file import find_keys


def record(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="To be created.")],
    since: SinceOption = None,
    from_start: FromStartOption = False,
    for_s: ForOption = None,
    nats_url: NatsUrlOption = DEFAULT_NATS_URL,
    namespace: NamespaceOption = "default",
    timeout_s: EventsTimeoutOption = DEFAULT_TIMEOUT_S,
) -> None:
    """Record all workers' events until Ctrl-C, on top of the blocks that they hold already."""
    start = start_position(since, from_start)

    async def run() -> None:
        async with nats_session(nats_url, namespace, timeout_s) as nats:
            ttl_s = await discovery_ttl_s(nats)
            with RecordingWriter(file, namespace) as writer:
                recorder = Recorder(nats, writer, ttl_s, timeout_s, find_keys(nats_url, namespace).cluster)
                try:
                    await recorder.start(start)
                    await until_stopped(recorder.run(), for_s, said=f"recording into {file}")
                    async with asyncio.timeout(timeout_s):
                        await recorder.catch_up()
                finally:
                    await recorder.close()
            _tell(recorder, writer, file)

    with errors_reported():
        asyncio.run(run())


def _tell(recorder: Recorder, writer: RecordingWriter, file: Path) -> None:
    typer.echo(
        f"{file}: {recorder.num_events} events in {recorder.num_batches} batches of {recorder.num_workers} workers, "
        f"{human_bytes(writer.bytes_written)}"
    )
    for worker_id, _ in sorted(recorder.without_base):
        typer.echo(f"warning: blocks that {worker_id} held before are not in the recording", err=True)
