"""`baton down`: ends a service on a Ray cluster."""

from functools import partial

import typer

from baton.cli.events.options import NamespaceOption
from baton.cli.terminal.exit_codes import ExitCode, errors_reported
from baton.cli.terminal.options import JsonOption, RayAddressOption
from baton.cli.terminal.service_news import print_news
from runtime.config.serving import LoggingConfig
from runtime.telemetry.logging import configure_logging


def down(
    address: RayAddressOption = "auto", namespace: NamespaceOption = "default", as_json: JsonOption = False
) -> None:
    """Drain and end a service that `baton up --ray` has brought up: requests in flight end, new ones are refused."""
    with errors_reported():
        configure_logging(LoggingConfig(level="warning"), "baton")
        from baton.service.on_ray.cluster import connected

        with connected(address, namespace):
            from baton.service.on_ray.commands import take_down

            clean = take_down(namespace, partial(print_news, as_json))
    raise typer.Exit(ExitCode.OK if clean else ExitCode.FAILED)
