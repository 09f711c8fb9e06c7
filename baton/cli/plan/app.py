"""The commands of `baton plan`."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from baton.cli.events.session import AtNats, nats_session, until_stopped
from baton.cli.lazy_group import lazy_group, options_apart, plain_app
from baton.cli.plan.show import show_plan
from baton.cli.terminal.exit_codes import errors_reported
from baton.cli.terminal.options import JsonOption
from baton.cli.terminal.output import console
from baton_proto.planner_control import Plan
from runtime.calls.planner import ask_plan
from runtime.config.serving import load_config
from runtime.errors import DeadlineError, UnavailableError

app = plain_app(name="plan", cls=lazy_group({"replay": "baton.cli.plan.replay:replay"}))


@app.callback(invoke_without_command=True)
@options_apart
def plan(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Watch and say what a planner would do.")] = False,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --dry-run: serving.yaml with the settings to try.")
    ] = None,
    decisions: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --dry-run: end after so many, not at Ctrl-C.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on with what it decides, until Ctrl-C.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, metavar="SECONDS", help="With --watch: between two looks.")
    ] = 1.0,
    *,
    at: AtNats,
    as_json: JsonOption = False,
) -> None:
    """See what the planner decides and why, and what another policy would."""
    if context.invoked_subcommand is not None:
        return
    with errors_reported():
        if dry_run:
            asyncio.run(until_stopped(_advise(at, config, decisions, as_json)))
            return
        if watch:
            asyncio.run(until_stopped(_watch(at, interval_s, as_json)))
            return
        _print(asyncio.run(_ask(at)), as_json)


def _print(answer: Plan, as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.encode(answer).decode())
    else:
        show_plan(console(), answer)


async def _ask(at: AtNats) -> Plan:
    async with at.session() as nats:
        return await ask_plan(nats, at.timeout_s)


async def _watch(at: AtNats, interval_s: float, as_json: bool) -> None:
    """A terminal shows what is true now; a pipe gets each decision once. A planner that ends is waited for."""
    live = sys.stdout.isatty() and not as_json
    seen, last = False, None
    async with at.session() as nats:
        while True:
            try:
                answer = await ask_plan(nats, at.timeout_s)
                decided = (answer.observation, answer.target, answer.holds, answer.problem)
                if live:
                    console().clear()
                if live or decided != last:
                    _print(answer, as_json)
                seen, last = True, decided
            except (UnavailableError, DeadlineError) as error:
                if not seen:
                    raise
                typer.echo(f"warning: {error}", err=True)
            await asyncio.sleep(interval_s)


async def _advise(at: AtNats, config: Path | None, decisions: int | None, as_json: bool) -> None:
    from baton.cli.plan.advise import advise  # here, because it imports the planner and numpy

    wanted = load_config(config)
    of_several = at.model if wanted.models else ""
    whose = None if wanted.models else at.model
    async with nats_session(at.nats_url, at.namespace, at.timeout_s, whose) as nats:
        await advise(nats, wanted, decisions, as_json, of_several)
