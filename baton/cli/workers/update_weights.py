"""`baton update-weights`: other weights for running workers, in place."""

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.terminal import options
from baton.cli.terminal.asking import OperatorsRouter
from baton.cli.terminal.exit_codes import ExitCode, errors_reported
from baton.cli.terminal.output import console
from baton.client.async_client import AsyncClient
from baton.client.service_status import WorkerWeights


def update_weights(
    model: Annotated[
        Path,
        typer.Option(metavar="FOLDER", help="A checkpoint of the served model's shape, on the workers' machines."),
    ],
    worker: Annotated[str, typer.Option(metavar="WORKER", help="Its id, as `baton status` shows it.")] = "",
    everyone: Annotated[bool, typer.Option("--all", help="All workers, or none.")] = False,
    served_model: Annotated[
        str, typer.Option(metavar="NAME", show_default=False, help="Whose weights, where several models are served.")
    ] = "",
    drain_timeout: options.DrainTimeoutOption = 30.0,
    *,
    router: OperatorsRouter,
    as_json: options.JsonOption = False,
) -> None:
    """Replace the weights of running workers: drain, read, forget cached prefixes, serve again."""
    if bool(worker) == everyone:
        raise typer.BadParameter("name one worker, or all of them with --all", param_hint="--worker")

    async def work() -> list[WorkerWeights]:
        async with AsyncClient.through(router.access) as client:
            return await client.update_weights(model, worker, drain_timeout, served_model)

    with errors_reported():
        outcomes = asyncio.run(work())
    if as_json:
        typer.echo(json.dumps([asdict(outcome) for outcome in outcomes]))
    for outcome in outcomes:
        if outcome.problem:
            typer.echo(f"error: {outcome.problem}", err=True)
        elif not as_json:
            console().print(f"{outcome.worker_id} is {outcome.state} with new weights, read in {outcome.seconds:.2f} s")
    if any(outcome.problem for outcome in outcomes):
        raise typer.Exit(ExitCode.FAILED)
