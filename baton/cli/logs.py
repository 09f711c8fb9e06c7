"""`baton logs`: what a process of the service has logged."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.events.options import NamespaceOption
from baton.cli.terminal.exit_codes import errors_reported
from baton.cli.terminal.options import RayAddressOption, ServiceOption
from baton.cli.terminal.service import local_run, ray_cluster
from baton.runs.run_file import Run
from baton.service.log_file import log_since, log_tail
from runtime.errors import UnavailableError

POLL_S = 0.2


def logs(
    process: Annotated[
        str, typer.Argument(metavar="PROCESS", help="A worker's id, router-1, nats, or on Ray control (the planner's).")
    ],
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, metavar="N", help="The last so many.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes.")] = False,
    log_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Read it there: of a service that runs no more.")
    ] = None,
    service: ServiceOption = None,
    address: RayAddressOption = "auto",
    namespace: NamespaceOption = "default",
) -> None:
    """Show the end of a process's log, of the service on this machine or on whichever node of a Ray cluster."""
    with errors_reported():
        run = local_run(service, address) if log_dir is None else None
        if run is not None:
            log_dir = _folder_of(run)
        if log_dir is not None:
            _print(_read_file(log_dir / f"{process}.log", lines, follow))
            return
        with ray_cluster(address, namespace):
            from baton.service.on_ray.commands import read_log

            _print(read_log(process, lines, follow))


def _folder_of(run: Run) -> Path:
    """Raises UnavailableError."""
    if run.file.log_dir is None:
        raise UnavailableError(f"the service {run} logs to its own terminal; started with --log-dir DIR it keeps files")
    return Path(run.file.log_dir)


def _read_file(path: Path, lines: int, follow: bool) -> Iterator[str]:
    """Raises UnavailableError."""
    try:
        text, offset = log_tail(path, lines)
        yield text
        while follow:
            time.sleep(POLL_S)
            text, offset = log_since(path, offset)
            yield text
    except OSError as error:
        raise UnavailableError(f"{path}: {error.strerror}") from error


def _print(pieces: Iterator[str]) -> None:
    for piece in pieces:
        typer.echo(piece, nl=False)
