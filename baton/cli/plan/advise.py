"""`baton plan --dry-run`: a planner that watches a running service and prints what it would do."""

import asyncio
import time
from typing import Final

import msgspec
import typer

from baton.cli.plan.show import show_decision
from baton.cli.terminal.output import console
from baton.service.local.local_launcher import this_machine
from baton.service.planning.budget import gpu_budget, gpus_per_worker
from baton_proto.planner import ALL_VERBS, DECODE, Holds, Role, Verb
from planner.journal import Decided, Line
from planner.loop import PlannerLoop
from planner.observing.live_observer import LiveObserver
from planner.planner import Planner
from runtime.config.serving import ServingConfig
from runtime.nats.client import NatsClient


class HandsOff:
    """A connector that lists all verbs and carries out none: a loop that is held calls none of them."""

    verbs: Final[tuple[Verb, ...]] = ALL_VERBS

    async def _refuse(self, worker_id: str, role: Role = DECODE) -> None:
        raise NotImplementedError("this planner only advises")

    add = remove = drain = sleep = wake = flip = _refuse


async def advise(nats: NatsClient, config: ServingConfig, decisions: int | None, as_json: bool) -> None:
    """Prints each decision as it is made; returns after `decisions` of them, never when None."""
    machines = this_machine()
    observer = LiveObserver(nats, config, tuple, gpu_budget(config, machines), gpus_per_worker(config, machines), Holds)
    left = asyncio.Semaphore(0)

    def show(line: Line) -> None:
        if not isinstance(line, Decided):
            return
        if as_json:
            document = {"observation": msgspec.structs.replace(line.observation, steps=[]), "target": line.target}
            typer.echo(msgspec.json.encode(document).decode())
        else:
            title = f"{line.target.policy}, {time.strftime('%H:%M:%S', time.localtime(line.time_s))}"
            show_decision(console(), line.observation, line.target, title)
        left.release()

    planner = Planner(config.planner, config.step_times)
    loop = PlannerLoop(config.planner, planner, observer, HandsOff(), write=show, held=lambda: "advice only")
    await observer.start()
    running = asyncio.create_task(loop.run())
    try:
        if decisions is None:
            await running
        for _ in range(decisions or 0):
            await left.acquire()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await observer.close()
