"""The commands of `baton events`, in the order in which its help shows them."""

from baton.cli.lazy_group import lazy_group, plain_app

COMMANDS = {
    "tail": "baton.cli.events.tail:tail",
    "lag": "baton.cli.events.lag:lag",
    "record": "baton.cli.events.record:record",
    "replay": "baton.cli.events.replay:replay",
    "tree": "baton.cli.events.tree:tree",
    "diff": "baton.cli.events.diff:diff",
    "explain": "baton.cli.events.explain:explain",
}

app = plain_app(name="events", cls=lazy_group(COMMANDS), no_args_is_help=True)


@app.callback()
def events() -> None:
    """Watch, record, replay and question the KV event stream."""
