"""Prints what happens to a service, for `baton up` and `baton down`."""

import contextlib
import json
from typing import Any

import typer


def print_news(as_json: bool, line: str, *, event: str, **fields: Any) -> None:
    """Prints a line, or a JSON object. Losses go to stderr as well, which may be a log on a full disk: the line is lost
    then, and the service goes on."""
    if event == "lost":
        with contextlib.suppress(OSError):
            typer.echo(line, err=True)
    if as_json:
        typer.echo(json.dumps({"event": event, **fields}))
    elif event != "lost":
        typer.echo(line)
