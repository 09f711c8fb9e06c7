"""`baton logs`: what a process of the service has logged."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.events.options import NamespaceOption
from baton.cli.terminal.exit_codes import errors_reported
from baton.cli.terminal.options import RayAddressOption
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
        Path | None, typer.Option(metavar="DIR", help="That `baton up` without --ray was given.")
    ] = None,
    address: RayAddressOption = "auto",
    namespace: NamespaceOption = "default",
) -> None:
    """Show the end of a process's log, on whichever node of the Ray cluster it runs, or from --log-dir."""
    with errors_reported():
        if log_dir is not None:
            _print(_read_file(log_dir / f"{process}.log", lines, follow))
            return
        from baton.service.on_ray.cluster import connected

        try:
            with connected(address, namespace):
                from baton.service.on_ray.commands import read_log

                _print(read_log(process, lines, follow))
        except UnavailableError as error:
            raise UnavailableError(f"{error}; of a service without Ray, --log-dir DIR shows the logs") from error


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
