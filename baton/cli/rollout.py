"""`baton rollout`: a running service becomes what is wanted, and loses no request."""

import asyncio
import functools
import json
import time
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.table import Table

from baton.cli.events.options import NamespaceOption, NatsUrlOption
from baton.cli.events.session import nats_session
from baton.cli.preflight import check_start
from baton.cli.terminal.exit_codes import ExitCode, errors_reported
from baton.cli.terminal.options import JsonOption, OperatorKeyFileOption
from baton.cli.terminal.output import console, print_table
from baton.cli.terminal.service_news import print_news
from baton.runs.access import OPERATOR_KEY_FLAG
from baton.runs.places import nats_place
from baton.runs.run_file import find_keys
from baton.service.wanted.configuration import changed, laid_over, wanted_models
from baton_proto.rollout import Back, Planned, Rollout, ServiceView
from runtime.calls.supervisor import ask_service, tell_supervisor
from runtime.config.overrides import merged, nested
from runtime.config.paths import absolute
from runtime.config.serving import load_config, parse_config
from runtime.config.yaml_file import read_yaml
from runtime.errors import DeadlineError, UnavailableError
from runtime.nats.client import NatsClient
from runtime.processes.own_code import own_code
from runtime.security.secret import Secret, read_secrets

TIMEOUT_S: Final = 60.0  # for an answer: a model may have to be converted first
POLL_S: Final = 0.3
STARTED_ANEW: Final = "the service was started anew meanwhile, as it was before; ask again"
AWAY_S: Final = 60.0  # for which NATS may be away while a roll-out is followed
UP_S: Final = 5.0  # within which a service that serves takes orders

ConfigOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="serving.yaml. The options of `baton up` go before it; default: what runs."),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME_OR_PATH",
        help="Other weights, as in `baton up`. Of several models: the one whose keys --set gives, such as model=PATH.",
    ),
]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A key; it goes before all.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would happen, and change nothing.")]
BackOption = Annotated[bool, typer.Option("--back", help="To what was before the last roll-out.")]


def rollout(
    config: ConfigOption = None,
    model: ModelOption = None,
    settings: SetOption = None,
    dry_run: DryRunOption = False,
    back: BackOption = False,
    nats_url: NatsUrlOption = "",
    namespace: NamespaceOption = "default",
    operator_key_file: OperatorKeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a running service what is wanted, without losing a request.

    It compares configuration, model and code (the installation that this command runs from) with what runs, shows which
    processes change and why, and follows the change: new workers before old ones drain, where there is room; then
    routers, which hand their ports over. When a new process does not become ready, the service becomes what it was.

    The service does it: when this command is interrupted the roll-out goes on, and the same command follows it again.
    """
    if back and (config or model or settings):
        raise typer.BadParameter("--back knows what to go back to: leave --config, --model and --set out")
    with errors_reported():
        given = None if config is None else absolute(_checked(config))
        changes: dict[str, Any] = functools.reduce(merged, map(nested, settings or ()), {})
        order = Back(dry_run) if back else Rollout(given, absolute(changes), own_code(), dry_run, model or "")
        try:
            problem = asyncio.run(_rolled_out(order, nats_url, namespace, operator_key_file, as_json))
        except KeyboardInterrupt:
            typer.echo("a roll-out that has begun goes on; the same command follows it", err=True)
            raise
        if problem:
            typer.echo(f"error: {problem}", err=True)
            raise typer.Exit(ExitCode.FAILED)


def _checked(path: Path) -> dict[str, Any]:
    """Raises ConfigError."""
    load_config(path)
    data: dict[str, Any] = read_yaml(path)
    return data


async def _rolled_out(order: Rollout | Back, url: str, namespace: str, key_file: Path | None, as_json: bool) -> str:
    """Why it failed; empty: it did not. Raises BatonError."""
    keys = find_keys(*nats_place(url, namespace)).operator
    if key_file is not None:
        keys = tuple(read_secrets(str(key_file), OPERATOR_KEY_FLAG))
    key: Secret | None = keys[0] if keys else None
    async with nats_session(url, namespace, TIMEOUT_S) as nats:
        view = await _view(nats, UP_S)
        if isinstance(order, Rollout):
            order = _checked_order(order, view)
        planned = await tell_supervisor(nats, order, TIMEOUT_S, key)
        _show(planned, as_json)
        return "" if order.dry_run or not planned.rows else await _followed(nats, as_json)


def _checked_order(order: Rollout, view: ServiceView) -> Rollout:
    """Finds here what a process would refuse at its start. Where one model is served, --model says its weights. Raises
    ConfigError, ModelError."""
    base = view.running if order.given is None else laid_over(order.given, view.options)
    if order.served_model and not base.get("models"):
        settings = absolute(merged({"model": order.served_model}, order.settings))
        order = msgspec.structs.replace(order, settings=settings, served_model="")
    given = changed(base, order.settings, order.served_model, runs=order.given is None)
    for service in wanted_models(parse_config(given), given, progress=True):
        check_start(service.config, service.files, None)
    return order


async def _followed(nats: NatsClient, as_json: bool) -> str:
    seen = 0
    while True:
        view = await _view(nats, AWAY_S, seen)
        for news in view.news:
            print_news(as_json, news.line, event=news.event, **news.fields)
        seen += len(view.news)
        if not view.under_way:
            told = view.news or (await ask_service(nats, TIMEOUT_S)).news  # of any roll-out
            return view.problem if told else STARTED_ANEW
        await asyncio.sleep(POLL_S)


async def _view(nats: NatsClient, patience_s: float, seen: int = 0) -> ServiceView:
    """Asks the service, for so long as nobody answers. `seen`: news that the caller has. Raises UnavailableError or
    DeadlineError."""
    began_s = time.monotonic()
    while True:
        try:
            return await ask_service(nats, TIMEOUT_S, seen)
        except (UnavailableError, DeadlineError):
            if time.monotonic() - began_s > patience_s:
                raise
        await asyncio.sleep(POLL_S)


def _show(planned: Planned, as_json: bool) -> None:
    if as_json:
        rows = [{"process": row.process, "what": row.what, "why": row.why} for row in planned.rows]
        typer.echo(json.dumps({"event": "plan", "rows": rows}))
    elif not planned.rows:
        typer.echo("nothing changes: what runs is what is wanted")
    else:
        table = Table("process", "what happens", "why")
        for row in planned.rows:
            table.add_row(row.process, row.what, row.why)
        print_table(console(), table)
