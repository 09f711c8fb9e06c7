"""`baton plan --dry-run`: planners that watch a running service, one for each model, and print what they would do."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import msgspec
import typer

from baton.cli.plan.show import show_decision
from baton.cli.terminal.output import console
from baton.service.local.local_launcher import this_machine
from baton.service.planning.budget import gpu_budget, gpus_per_worker, gpus_together, has_own_budget
from baton_proto.planner import ALL_VERBS, DECODE, Holds, Role, Verb
from planner.journal import Decided, Line
from planner.loop import PlannerLoop
from planner.observing.live_observer import LiveObserver
from planner.planner import Planner
from planner.shared_budget import Member, SharedBudget
from runtime.config.model_entry import model_namespace
from runtime.config.models import entries_of, models_of
from runtime.config.serving import ServingConfig
from runtime.end_task import end_tasks
from runtime.errors import ConfigError
from runtime.nats.client import NatsClient


class HandsOff:
    """A connector that lists all verbs and carries out none: a loop that is held calls none of them."""

    verbs: Final[tuple[Verb, ...]] = ALL_VERBS

    async def _refuse(self, worker_id: str, role: Role = DECODE) -> None:
        raise NotImplementedError("this planner only advises")

    add = remove = drain = sleep = wake = flip = _refuse


class _Shown:
    """Prints the decisions of one planner, so many (None: all), and sets `enough` then. `model`: empty where there is
    one."""

    def __init__(self, model: str, decisions: int | None, as_json: bool) -> None:
        self.enough = asyncio.Event()
        self._model = model
        self._left = decisions
        self._as_json = as_json

    def __call__(self, line: Line) -> None:
        if not isinstance(line, Decided) or self._left == 0:
            return
        named: dict[str, Any] = {"model": self._model} if self._model else {}
        if self._as_json:
            document = {"observation": msgspec.structs.replace(line.observation, steps=[]), "target": line.target}
            typer.echo(msgspec.json.encode(named | document).decode())
        else:
            title = f"{line.target.policy}, {time.strftime('%H:%M:%S', time.localtime(line.time_s))}"
            show_decision(console(), line.observation, line.target, ", ".join([*named.values(), title]))
        if self._left is not None:
            self._left -= 1
        if self._left == 0:
            self.enough.set()


async def advise(nats: NatsClient, config: ServingConfig, decisions: int | None, as_json: bool, only: str) -> None:
    """Prints each decision as it is made; returns after `decisions` of each planner, never when None. `nats`: for the
    namespace of the service where `config` has several models, which share one budget. `only`: the one of these that is
    shown; empty: all. Raises ConfigError."""
    machines, several = this_machine(), bool(config.models)
    each = list(zip(entries_of(config), models_of(config), strict=True))
    planned = [(entry, one) for entry, one in each if not entry.sleeps]
    if only not in ("", *(names := [entry.name for entry, _ in planned])):
        raise ConfigError("--model", f"is {only!r}, and planned are: {', '.join(names) or 'none'}")
    kept = max((gpus_together(one, machines) for entry, one in each if entry.sleeps), default=0)
    if kept:
        typer.echo(f"{kept} GPUs are kept for models that sleep until they are asked for", err=True)
    shared = SharedBudget(gpu_budget(config, machines), lambda: kept)
    members = {  # of the budget before the first one decides
        entry.name: shared.member(entry.name, gpus_together(one, machines), entry.weight)
        for entry, one in planned
        if several and not has_own_budget(one)
    }
    running, enough = [], []
    async with AsyncExitStack() as closing:
        for entry, one in planned:
            its = nats.within(model_namespace(nats.namespace, entry.name)) if several else nats
            show = _Shown(entry.name if several else "", decisions if only in ("", entry.name) else 0, as_json)
            if only in ("", entry.name):
                enough.append(asyncio.create_task(show.enough.wait()))
            planner = Planner(one.planner, one.step_times, entry.slug if several else "")
            running.append(
                await closing.enter_async_context(_planning(its, one, planner, show, members.get(entry.name)))
            )
        first: list[asyncio.Future[Any]] = [asyncio.gather(*enough), *running]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*(one for one in running if one.done()))  # raises why it has ended


@asynccontextmanager
async def _planning(
    nats: NatsClient, config: ServingConfig, planner: Planner, show: _Shown, shared: Member | None
) -> AsyncIterator["asyncio.Task[None]"]:
    """A planner of one model that only advises, until the context ends."""
    machines = this_machine()
    observer = LiveObserver(nats, config, tuple, gpu_budget(config, machines), gpus_per_worker(config, machines), Holds)
    loop = PlannerLoop(
        config.planner, planner, observer, HandsOff(), write=show, held=lambda: "advice only", shared=shared
    )
    await observer.start()
    running = asyncio.create_task(loop.run())
    try:
        yield running
    finally:
        await end_tasks(running)
        await observer.close()
