"""`baton logs`: what the processes of the service have logged."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Protocol

import typer

from baton.cli.events.options import NamespaceOption
from baton.cli.terminal.exit_codes import errors_reported
from baton.cli.terminal.options import RayAddressOption, ServiceOption
from baton.cli.terminal.service import meant_run, ray_cluster
from baton.service.logs.merged_logs import Entry, MergedLogs
from runtime.config.surroundings import LoggingConfig
from runtime.errors import UnavailableError
from runtime.telemetry.logging import configure_logging

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

    They are those of the service on this machine, or of one on a Ray cluster, from all its nodes.
    """
    with errors_reported():
        configure_logging(LoggingConfig(level="warning"), "baton")
        run = None
        if log_dir is None:
            run, namespace = meant_run(service, address, namespace)
        if run is not None and run.file.log_dir is not None:
            log_dir = Path(run.file.log_dir)
        if log_dir is not None:
            _print(_read(MergedLogs(log_dir, process), process, lines, follow))
            return
        with ray_cluster(address, namespace):
            from baton.service.on_ray.cluster_logs import ClusterLogs

            _print(_read(ClusterLogs(process), process, lines, follow))


class Logs(Protocol):
    """The logs of several processes as one. Its methods raise OSError."""

    @property
    def there(self) -> bool:
        """False when there is nothing to follow any more."""

    def processes(self) -> list[str]: ...

    def tail(self, lines: int) -> list[Entry]: ...

    def news(self) -> list[Entry]: ...


def _read(logs: Logs, process: str | None, lines: int, follow: bool) -> Iterator[str]:
    """Raises UnavailableError."""
    try:
        last = "".join(entry.text for entry in logs.tail(lines))
        known = sorted(logs.processes())
        if process is not None and process not in known:
            raise UnavailableError(
                f"there is no log of {process!r}; those that are there: {', '.join(known) or 'none'}"
            )
        if not known and not (follow and logs.there):
            raise UnavailableError("no process has a log there")
        yield from last.splitlines(keepends=True)[-lines:] if lines else []
        while follow and logs.there:
            time.sleep(POLL_S)
            yield from (entry.text for entry in logs.news())
    except OSError as error:
        raise UnavailableError(f"{error.filename}: {error.strerror}") from error


def _print(pieces: Iterator[str]) -> None:
    for piece in pieces:
        typer.echo(piece, nl=False)
