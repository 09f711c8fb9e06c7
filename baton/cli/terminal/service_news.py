"""What happens to a service, as `baton up` and `baton down` print it."""

import json
from typing import Any

import typer


def print_news(as_json: bool, line: str, *, event: str, **fields: Any) -> None:
    """As lines, or as one JSON object each. Losses go to stderr as well."""
    if event == "lost":
        typer.echo(line, err=True)
    if as_json:
        typer.echo(json.dumps({"event": event, **fields}))
    elif event != "lost":
        typer.echo(line)
