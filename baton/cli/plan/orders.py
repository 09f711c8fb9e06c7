"""`baton scale`, `baton drain` and `baton flip`: orders of an operator to a running planner."""

import asyncio
import json
import re
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.events.session import AtNats
from baton.cli.terminal.exit_codes import errors_reported
from baton.cli.terminal.options import JsonOption, OperatorKeyFileOption
from baton.runs.access import OPERATOR_KEY_FLAG
from baton_proto.planner_control import Order, Release, Scale
from runtime.calls.planner import tell_planner
from runtime.security.secret import read_secrets

WorkerArgument = Annotated[str, typer.Argument(metavar="WORKER", help="Its id, as `baton status` shows it.")]


def scale(
    counts: Annotated[
        list[str] | None, typer.Argument(metavar="[ROLE=N]...", help="Such as prefill=2 decode=3.", show_default=False)
    ] = None,
    release: Annotated[bool, typer.Option("--release", help="Let the planner decide alone again.")] = False,
    *,
    at: AtNats,
    operator_key_file: OperatorKeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set how many workers there are, whatever the planner thinks; limits and the GPU budget still hold.

    A role that is not named stays as it was: with the planner, or at what was set before.
    """
    given = [_count(text) for text in counts or []]
    if release == bool(given):
        raise typer.BadParameter("name counts such as prefill=2 decode=3, or --release")
    if len(dict(given)) < len(given):
        raise typer.BadParameter("a role is named twice")
    order = Release() if release else Scale(**dict(given))
    _tell(order, at, operator_key_file, as_json)


def drain(
    worker: WorkerArgument,
    *,
    at: AtNats,
    operator_key_file: OperatorKeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a worker finish what it has, and end it. The planner starts another one when that is needed."""
    _tell(Order("drain", worker), at, operator_key_file, as_json)


def flip(
    worker: WorkerArgument,
    *,
    at: AtNats,
    operator_key_file: OperatorKeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Turn a prefill worker into a decode worker or back, and hold the counts that come of it."""
    _tell(Order("flip", worker), at, operator_key_file, as_json)


def _count(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"(prefill|decode)=(\d{1,6})", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a count such as prefill=2 or decode=3")
    return match[1], int(match[2])


def _tell(order: Scale | Release | Order, at: AtNats, key_file: Path | None, as_json: bool) -> None:
    async def tell() -> str:
        keys = at.keys().operator
        if key_file is not None:
            keys = tuple(read_secrets(str(key_file), OPERATOR_KEY_FLAG))
        async with at.session() as nats:
            return await tell_planner(nats, order, at.timeout_s, keys[0] if keys else None)

    with errors_reported():
        sentence = asyncio.run(tell())
        typer.echo(json.dumps({"done": sentence}) if as_json else sentence)
