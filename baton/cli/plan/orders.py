"""`baton scale`, `baton drain` and `baton flip`: orders of an operator to a running planner."""

import asyncio
import json
import re
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.events.options import DEFAULT_NATS_URL, DEFAULT_TIMEOUT_S, NamespaceOption, NatsUrlOption
from baton.cli.events.session import nats_session
from baton.cli.plan.options import PlannerTimeoutOption
from baton.cli.terminal.exit_codes import errors_reported
from baton.cli.terminal.options import JsonOption, OfModelOption, OperatorKeyFileOption
from baton.runs.access import OPERATOR_KEY_FLAG
from baton.runs.places import nats_place
from baton.runs.run_file import find_keys
from baton_proto.planner_control import Order, Release, Scale
from runtime.calls.planner import tell_planner
from runtime.security.secret import read_secrets

WorkerArgument = Annotated[str, typer.Argument(metavar="WORKER", help="Its id, as `baton status` shows it.")]


def scale(
    counts: Annotated[
        list[str] | None, typer.Argument(metavar="[ROLE=N]...", help="Such as prefill=2 decode=3.", show_default=False)
    ] = None,
    release: Annotated[bool, typer.Option("--release", help="Let the planner decide alone again.")] = False,
    nats_url: NatsUrlOption = DEFAULT_NATS_URL,
    namespace: NamespaceOption = "default",
    model: OfModelOption = "",
    timeout_s: PlannerTimeoutOption = DEFAULT_TIMEOUT_S,
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
    _tell(order, nats_url, namespace, model, timeout_s, operator_key_file, as_json)


def drain(
    worker: WorkerArgument,
    nats_url: NatsUrlOption = DEFAULT_NATS_URL,
    namespace: NamespaceOption = "default",
    model: OfModelOption = "",
    timeout_s: PlannerTimeoutOption = DEFAULT_TIMEOUT_S,
    operator_key_file: OperatorKeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a worker finish what it has, and end it. The planner starts another one when that is needed."""
    _tell(Order("drain", worker), nats_url, namespace, model, timeout_s, operator_key_file, as_json)


def flip(
    worker: WorkerArgument,
    nats_url: NatsUrlOption = DEFAULT_NATS_URL,
    namespace: NamespaceOption = "default",
    model: OfModelOption = "",
    timeout_s: PlannerTimeoutOption = DEFAULT_TIMEOUT_S,
    operator_key_file: OperatorKeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Turn a prefill worker into a decode worker or back, and hold the counts that come of it."""
    _tell(Order("flip", worker), nats_url, namespace, model, timeout_s, operator_key_file, as_json)


def _count(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"(prefill|decode)=(\d{1,6})", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a count such as prefill=2 or decode=3")
    return match[1], int(match[2])


def _tell(
    order: Scale | Release | Order,
    url: str,
    namespace: str,
    model: str,
    timeout_s: float,
    key_file: Path | None,
    as_json: bool,
) -> None:
    async def tell() -> str:
        keys = find_keys(*nats_place(url, namespace, model)).operator
        if key_file is not None:
            keys = tuple(read_secrets(str(key_file), OPERATOR_KEY_FLAG))
        async with nats_session(url, namespace, timeout_s, model) as nats:
            return await tell_planner(nats, order, timeout_s, keys[0] if keys else None)

    with errors_reported():
        sentence = asyncio.run(tell())
        typer.echo(json.dumps({"done": sentence}) if as_json else sentence)
