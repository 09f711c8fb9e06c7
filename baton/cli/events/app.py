"""The commands of `baton events`, in the order in which its help shows them."""

import typer

from baton.cli.events.diff import diff
from baton.cli.events.explain import explain
from baton.cli.events.tree import tree
from baton.cli.exit_codes import EXIT_CODES_HELP

app = typer.Typer(
    name="events",
    help="Watch, record and question what the workers cache and where requests go.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES_HELP,
)
app.command(epilog=EXIT_CODES_HELP)(tree)
app.command(epilog=EXIT_CODES_HELP)(diff)
app.command(epilog=EXIT_CODES_HELP)(explain)
