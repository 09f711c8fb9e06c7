"""The commands of `baton events`, in the order in which its help shows them."""

import typer

from baton.cli.events.bridge import bridge
from baton.cli.events.diff import diff
from baton.cli.events.explain import explain
from baton.cli.events.lag import lag
from baton.cli.events.record import record
from baton.cli.events.replay import replay
from baton.cli.events.tail import tail
from baton.cli.events.tree import tree
from baton.cli.exit_codes import EXIT_CODES_HELP

app = typer.Typer(
    name="events",
    help="Watch, record, replay and question the KV event stream.",
    no_args_is_help=True,
    epilog=EXIT_CODES_HELP,
)
app.command(epilog=EXIT_CODES_HELP)(tail)
app.command(epilog=EXIT_CODES_HELP)(lag)
app.command(epilog=EXIT_CODES_HELP)(record)
app.command(epilog=EXIT_CODES_HELP)(replay)
app.command(epilog=EXIT_CODES_HELP)(bridge)
app.command(epilog=EXIT_CODES_HELP)(tree)
app.command(epilog=EXIT_CODES_HELP)(diff)
app.command(epilog=EXIT_CODES_HELP)(explain)
