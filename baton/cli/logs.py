"""`baton logs`: what the processes of the service have logged."""

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
from baton.service.merged_logs import SUFFIX, MergedLogs
from runtime.errors import ConfigError, UnavailableError

POLL_S = 0.2


def logs(
    process: Annotated[
        str | None,
        typer.Argument(
            metavar="PROCESS",
            help="A worker's id, router-1, nats, or on Ray control (the planner's). [default: all, by time]",
            show_default=False,
        ),
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, metavar="N", help="The last so many.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes.")] = False,
    log_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Read it there: of a service that runs no more.")
    ] = None,
    service: ServiceOption = None,
    address: RayAddressOption = "auto",
    namespace: NamespaceOption = "default",
) -> None:
    """Show the end of all logs as one, or of a process's.

    They are those of the service on this machine, or of a process on whichever node of a Ray cluster.
    """
    with errors_reported():
        run = local_run(service, address) if log_dir is None else None
        if run is not None:
            log_dir = _folder_of(run)
        if log_dir is not None:
            if process is None:
                _print(_read_all(log_dir, lines, follow))
            else:
                _print(_read_file(log_dir / f"{process}{SUFFIX}", lines, follow))
            return
        with ray_cluster(address, namespace):
            from baton.service.on_ray.commands import read_log

            if process is None:
                raise ConfigError("PROCESS", "on Ray one process's log is read at a time; name one, such as router-1")
            _print(read_log(process, lines, follow))


def _folder_of(run: Run) -> Path:
    """Raises UnavailableError."""
    if run.file.log_dir is None:
        raise UnavailableError(f"the service {run} logs to its own terminal: start it with --log-dir DIR to keep files")
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


def _read_all(folder: Path, lines: int, follow: bool) -> Iterator[str]:
    """Raises UnavailableError."""
    logs = MergedLogs(folder)
    try:
        last = logs.tail(lines)
        if not last and not follow:
            raise UnavailableError(f"{folder}: holds no log")
        yield from last
        while follow:
            time.sleep(POLL_S)
            yield from logs.news()
    except OSError as error:
        raise UnavailableError(f"{error.filename}: {error.strerror}") from error


def _print(pieces: Iterator[str]) -> None:
    for piece in pieces:
        typer.echo(piece, nl=False)
