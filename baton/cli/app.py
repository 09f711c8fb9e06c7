"""The commands of `baton`, in the order in which its help shows them."""

import importlib.metadata
from typing import Annotated

import typer

from baton.cli.chat import chat
from baton.cli.demo import demo
from baton.cli.down import down
from baton.cli.events.app import app as events_app
from baton.cli.exit_codes import EXIT_CODES_HELP
from baton.cli.generate import generate
from baton.cli.logs import logs
from baton.cli.plan.app import app as plan_app
from baton.cli.plan.orders import drain, flip, scale
from baton.cli.profile import profile
from baton.cli.sleep import sleep, wake
from baton.cli.status import status
from baton.cli.top import top
from baton.cli.up import up

app = typer.Typer(
    name="baton",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain lines, which stay whole in pipes and logs
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES_HELP,
)
for command in (up, down, chat, generate, status, top, logs, scale, drain, flip, sleep, wake, profile, demo):
    app.command(epilog=EXIT_CODES_HELP)(command)
app.add_typer(events_app)
app.add_typer(plan_app)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(importlib.metadata.version("baton-serve"))
        raise typer.Exit


@app.callback()
def baton(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Serve large language models with prefill and decode on different workers."""


def main() -> None:
    app()
