"""Options that several commands of `baton events` take."""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration_s(text: str) -> float:
    """'90', '90s', '5m', '1h'. Raises typer.BadParameter."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a time such as 90s, 5m or 1h")
    return float(match[1]) * _SECONDS[match[2]]


def check_name(text: str | None) -> str | None:
    if text is not None and not re.fullmatch(r"[^\s.*>]+", text):
        raise typer.BadParameter(f"{text!r} must be one word without '.', '*' and '>'")
    return text


NatsUrlOption = Annotated[
    str,
    typer.Option(
        "--nats-url",
        "--service",
        envvar="BATON_NATS_URL",
        metavar="URL or NAME",
        help="NATS, as `baton up` shows it, or the name of a service where several run here.",
        show_default="that of the one that runs here",
    ),
]
NamespaceOption = Annotated[
    str,
    typer.Option(
        "--namespace", envvar="BATON_NAMESPACE", metavar="NAME", callback=check_name, help="As in serving.yaml."
    ),
]
WorkerOption = Annotated[
    str | None, typer.Option("--worker", metavar="ID", callback=check_name, help="Only this worker's events.")
]
SinceOption = Annotated[
    float | None,
    typer.Option(
        "--since", metavar="TIME", parser=parse_duration_s, help="Begin with what was stored since then: 90s, 5m, 1h."
    ),
]
FromStartOption = Annotated[bool, typer.Option("--from-start", help="Begin with all that NATS has stored.")]
ForOption = Annotated[
    float | None,
    typer.Option("--for", metavar="TIME", parser=parse_duration_s, help="End after this time, instead of at Ctrl-C."),
]


def start_position(since_s: float | None, from_start: bool) -> int | datetime | None:
    """Where to begin, as EventLog.seek takes it. Raises typer.BadParameter."""
    if since_s is not None and from_start:
        raise typer.BadParameter("--since and --from-start exclude each other")
    if since_s is not None:
        return datetime.now(UTC) - timedelta(seconds=since_s)
    return 1 if from_start else None
