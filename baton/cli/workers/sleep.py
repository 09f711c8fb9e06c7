"""`baton sleep` and `baton wake`: a worker gives its memory back, and takes it again."""

import asyncio
import json
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated

import typer

from baton.cli.events.session import nats_session
from baton.cli.terminal import options
from baton.cli.terminal.asking import OperatorsRouter
from baton.cli.terminal.exit_codes import ExitCode, errors_reported
from baton.cli.terminal.output import console
from baton.client.async_client import AsyncClient
from baton.client.service_status import WorkerSleep
from baton.runs.run_file import run_at
from baton_proto.planner import PREFILL
from baton_proto.planner_control import Plan
from baton_proto.worker import TAGS
from runtime.calls.planner import ask_plan
from runtime.errors import BatonError

PLANNER_TIMEOUT_S = 2.0

WorkerArgument = Annotated[
    str | None, typer.Argument(metavar="WORKER", help="Its id, as `baton status` shows it.", show_default=False)
]
AllOption = Annotated[bool, typer.Option("--all", help="All workers at once.")]
ModelOption = Annotated[str, typer.Option(metavar="NAME", show_default=False, help="With --all: of this model.")]
Outcomes = dict[str, WorkerSleep | BatonError]


def sleep(
    worker: WorkerArgument = None,
    everyone: AllOption = False,
    model: ModelOption = "",
    level: Annotated[
        int, typer.Option(min=1, max=2, help="1 keeps the weights in host memory, 2 drops them and reads them again.")
    ] = 1,
    drain_timeout: options.DrainTimeoutOption = 30.0,
    *,
    router: OperatorsRouter,
    as_json: options.JsonOption = False,
) -> None:
    """Drain a worker and give its memory back: weights and KV."""
    _check(worker, everyone, model)

    async def work() -> Outcomes:
        wish = await _planners_wish(router.access.place, worker, model)
        async with AsyncClient.through(router.access) as client:
            if worker is None:
                outcomes = await client.sleep_all(level, drain_timeout, model)
            else:
                outcomes = {worker: await client.sleep(worker, level, drain_timeout)}
        if wish:
            typer.echo(f"warning: {wish}", err=True)
        return outcomes

    _report(work(), everyone, as_json)


def wake(
    worker: WorkerArgument = None,
    everyone: AllOption = False,
    model: ModelOption = "",
    tags: Annotated[str, typer.Option(metavar="TAG,TAG", help=f"{', '.join(TAGS)}. [default: both]")] = "",
    *,
    router: OperatorsRouter,
    as_json: options.JsonOption = False,
) -> None:
    """Take a sleeping worker's memory again; it serves when all of it is there."""
    _check(worker, everyone, model)
    wanted = [tag for tag in tags.split(",") if tag]
    if strange := [tag for tag in wanted if tag not in TAGS]:
        raise typer.BadParameter(f"{strange[0]!r} is none of {', '.join(TAGS)}", param_hint="--tags")

    async def work() -> Outcomes:
        async with AsyncClient.through(router.access) as client:
            if worker is None:
                return await client.wake_all(wanted, model)
            return {worker: await client.wake(worker, wanted)}

    _report(work(), everyone, as_json)


def _check(worker: str | None, everyone: bool, model: str) -> None:
    if (worker is None) != everyone:
        raise typer.BadParameter("name one worker, or all of them with --all", param_hint="WORKER")
    if model and not everyone:
        raise typer.BadParameter("is for --all: a worker's own name suffices", param_hint="--model")


async def _planners_wish(address: str, worker_id: str | None, model: str) -> str:
    """Returns planners' objections to the sleep of the worker, or of all workers (`model`: of one of several), as
    sentences; empty without one."""
    run = await asyncio.to_thread(run_at, address)
    if run is None or not run.file.nats:
        return ""
    said = []
    for one in [model] if model else run.file.models or [""]:
        with suppress(BatonError, StopIteration):  # no planner runs, or it has not seen the worker yet
            async with nats_session(run.file.nats, run.file.namespace, PLANNER_TIMEOUT_S, one) as nats:
                plan = await ask_plan(nats, PLANNER_TIMEOUT_S)
            said.append(_wish(plan, worker_id, f" --model {one}" if one else ""))
    return "; ".join(filter(None, said))


def _wish(plan: Plan, worker_id: str | None, whose: str) -> str:
    """Raises StopIteration when the planner does not know the worker."""
    if worker_id is None:
        wanted = 0 if plan.target is None else plan.target.prefill + plan.target.decode
        return f"the planner wants {wanted} workers and wakes them again" if wanted else ""
    seen = [] if plan.observation is None else plan.observation.workers
    role = next(worker.role for worker in seen if worker.worker_id == worker_id)
    others = [one for one in seen if one.role == role and one.state == "ready" and one.worker_id != worker_id]
    wanted = 0 if plan.target is None else plan.target.prefill if role == PREFILL else plan.target.decode
    if len(others) >= wanted:
        return ""
    hint = f"; `baton scale {role}={len(others)}{whose}` before lets it sleep" if others else ""
    return f"the planner wants {wanted} {role} workers and wakes {worker_id} again{hint}"


def _report(asking: Coroutine[None, None, Outcomes], everyone: bool, as_json: bool) -> None:
    with errors_reported():
        outcomes = asyncio.run(asking)
    rows = [
        {"worker_id": worker, "problem": str(outcome)} if isinstance(outcome, BatonError) else asdict(outcome)
        for worker, outcome in outcomes.items()
    ]
    if as_json:
        typer.echo(json.dumps(rows if everyone else rows[0]))
    for outcome in outcomes.values():
        if isinstance(outcome, BatonError):
            typer.echo(f"error: {outcome}", err=True)
        elif not as_json:
            _show(outcome)
    if any(isinstance(outcome, BatonError) for outcome in outcomes.values()):
        raise typer.Exit(ExitCode.FAILED)


def _show(outcome: WorkerSleep) -> None:
    freed = f", {outcome.freed_bytes / 2**20:,.0f} MiB free" if outcome.freed_bytes else ""
    asleep = f" ({', '.join(outcome.asleep)} asleep)" if outcome.asleep else ""
    console().print(f"{outcome.worker_id} is {outcome.state}{asleep}{freed}, after {outcome.seconds:.2f} s")
