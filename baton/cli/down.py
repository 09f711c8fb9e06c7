"""`baton down`: ends a service of this user on this machine, or one on a Ray cluster."""

import os
import select
import signal
from functools import partial

import typer

from baton.cli.events.options import NamespaceOption
from baton.cli.terminal.exit_codes import ExitCode, errors_reported
from baton.cli.terminal.options import JsonOption, RayAddressOption, ServiceOption
from baton.cli.terminal.service import meant_run, ray_cluster
from baton.cli.terminal.service_news import print_news
from baton.runs.run_file import Run
from baton.service.telling import Tell
from runtime.config.surroundings import LoggingConfig
from runtime.telemetry.logging import configure_logging


def down(
    service: ServiceOption = None,
    address: RayAddressOption = "auto",
    namespace: NamespaceOption = "default",
    as_json: JsonOption = False,
) -> None:
    """Drain and end a service: requests in flight end, new ones are refused.

    It is the one that runs on this machine, or else one that `baton up --ray` has brought up: --service names it on its
    head node, --namespace elsewhere.
    """
    with errors_reported():
        configure_logging(LoggingConfig(level="warning"), "baton")
        tell = partial(print_news, as_json)
        run, namespace = meant_run(service, address, namespace)
        if run is not None:
            clean = _end(run, tell)
        else:
            with ray_cluster(address, namespace):
                from baton.service.on_ray.commands import take_down

                clean = take_down(namespace, tell)
    raise typer.Exit(ExitCode.OK if clean else ExitCode.FAILED)


def _end(run: Run, tell: Tell) -> bool:
    """False when the service was killed before it had ended in order."""
    tell(f"draining {run}", event="draining")
    process = os.pidfd_open(run.file.pid)
    signal.pidfd_send_signal(process, signal.SIGTERM)
    select.select([process], [], [])  # returns at the end of the process
    os.close(process)
    clean = not run.folder.exists()
    tell("all processes have ended", event="stopped", clean=clean)
    return clean
