"""The commands of `baton plan`."""

import typer

from baton.cli.exit_codes import EXIT_CODES_HELP
from baton.cli.plan.replay import replay

app = typer.Typer(
    name="plan",
    help="See what the planner decides, and what another policy would.",
    no_args_is_help=True,
    epilog=EXIT_CODES_HELP,
)


@app.callback()
def plan() -> None:
    """With only one command, typer would otherwise leave its name out."""


app.command(epilog=EXIT_CODES_HELP)(replay)
