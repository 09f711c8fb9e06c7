"""Takes orders for roll-outs, one at a time, and tells how far the last one is.

A roll-out goes on when whoever asked for it has left. Who asks for the same one again follows it.
"""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Final

import msgspec
import structlog

from baton.service.launcher import Former, Generation
from baton.service.launches import with_nats_url
from baton.service.planning.running_planner import RunningPlanner
from baton.service.rolling.plan import SUPERVISOR, Source, living, plan, refuse, rows
from baton.service.rolling.roll import roll_out
from baton.service.supervisor import Supervisor
from baton.service.telling import Tell
from baton.service.wanted.configuration import (
    changed,
    laid_over,
    refuse_other_tokens,
    together,
    wanted_models,
    weights_state,
)
from baton_proto.decoding import MAX_TEXT
from baton_proto.rollout import (
    MAJOR,
    Answer,
    Back,
    News,
    Planned,
    Question,
    Rollout,
    ServiceView,
    ShowService,
    decode_question,
    encode,
)
from runtime.calls.over_nats import answered
from runtime.checkpoint.served_model import served_model
from runtime.config.models import models_of
from runtime.config.paths import absolute
from runtime.config.serving import ServingConfig, parse_config
from runtime.end_task import end_tasks
from runtime.errors import BatonError, ConfigError, InvalidRequestError
from runtime.nats.client import connect
from runtime.nats.subjects import supervisor_subject
from runtime.processes.own_code import check_code, own_code
from runtime.security.proven_orders import ProvenOrders

UNDER_WAY: Final = "a roll-out is under way"

log = structlog.get_logger()


class Rollouts:
    """A context in which orders are taken. `options`: part of serving.yaml that goes before any file."""

    def __init__(self, supervisor: Supervisor, planner: RunningPlanner, options: Mapping[str, Any], tell: Tell) -> None:
        self._supervisor = supervisor
        self._planner = planner
        self._options = dict(options)
        self._tell_all = tell
        self._proven = ProvenOrders(SUPERVISOR, ())
        self._closing = AsyncExitStack()
        self._first = Source(own_code(), {})  # now: the files may be others later
        self._news: list[News] = []  # of the last roll-out
        self._order: Rollout | Back | None = None  # under way
        self._planned = Planned([])
        self._task: asyncio.Task[None] | None = None
        self._problem = ""

    async def __aenter__(self) -> "Rollouts":
        """Raises UnavailableError when NATS does not answer."""
        config, keys = self._supervisor.config, self._supervisor.keys
        self._proven = ProvenOrders(SUPERVISOR, keys.operator)  # now: those of processes that were taken over
        assert config.nats.url is not None, "not started"
        nats = await connect(config.nats.url, SUPERVISOR, config.namespace, config.workers.ready_timeout_s, keys.nats)
        self._closing.push_async_callback(nats.close)
        await nats.answer(supervisor_subject(config.namespace), self._answer)
        self._first = replace(self._first, weights=await asyncio.to_thread(_weights, config))
        generation = self._supervisor.generation
        steps = plan(self._supervisor.children, config, generation, self._first, living(self._supervisor.children))
        if generation.number > 1 and (steps.old or steps.old_routers):  # an earlier supervisor has begun it
            self._begin(Rollout(None, {}, self._first.code), Planned(rows(steps, config, config)), config, generation)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._closing.aclose()
        await end_tasks(self._task)

    async def _answer(self, data: bytes) -> bytes:
        return encode(Answer(MAJOR, await answered(SUPERVISOR, data, decode_question, self._said)))

    async def _said(self, question: Question) -> ServiceView | Planned:
        return self._view(question.body) if isinstance(question.body, ShowService) else await self._take(question)

    def _view(self, asked: ShowService) -> ServiceView:
        supervisor = self._supervisor
        running = absolute(msgspec.to_builtins(supervisor.config))
        for part in (running, *running["models"]):
            part["engine"]["cache_salt"] = None  # a secret
        code = self._first.of(supervisor.generation).code
        news = self._news[asked.seen :]
        return ServiceView(
            running, self._options, code.version, news, self._order is not None, self._problem, self._proven.challenge
        )

    async def _take(self, question: Question) -> Planned:
        """Raises BatonError."""
        order = question.body
        assert not isinstance(order, ShowService)
        by = self._proven.check(order, question.proof)
        log.info("an operator orders", order=type(order).__name__, by=by)
        if self._order is not None and order == self._order:
            return self._planned
        config, generation = await asyncio.to_thread(self._next, order)
        if self._order is not None:
            raise InvalidRequestError("rollout", f"{UNDER_WAY}: wait until it has ended, then ask again")
        now = self._supervisor.config
        steps = plan(self._supervisor.children, config, generation, self._first, living(self._supervisor.children))
        planned = Planned(rows(steps, now, config))
        if planned.rows and not order.dry_run:
            self._begin(order, planned, config, generation)
        return planned

    def _begin(self, order: Rollout | Back, planned: Planned, config: ServingConfig, generation: Generation) -> None:
        self._order, self._planned, self._news, self._problem = order, planned, [], ""
        self._task = asyncio.create_task(self._carry_out(config, generation), name="roll-out")

    def _next(self, order: Rollout | Back) -> tuple[ServingConfig, Generation]:
        """What the order wants. Raises ConfigError, ModelError."""
        now, config = self._supervisor.generation, self._supervisor.config
        if isinstance(order, Back):
            if now.before is None:
                raise ConfigError("--back", "there was no roll-out since this service began: nothing to go back to")
            after, code = now.before.config, now.before.code
        else:
            after = self._wanted(order)
            code = None if order.code.version == self._first.code.version else order.code
            if code is not None:
                check_code(code)
        return after, Generation(now.number + 1, code, _weights(after), Former(config, now.code))

    def _wanted(self, order: Rollout) -> ServingConfig:
        """Raises ConfigError, ModelError."""
        config = self._supervisor.config
        runs = order.given is None
        base = msgspec.to_builtins(config) if order.given is None else laid_over(order.given, self._options)
        given = changed(base, order.settings, order.served_model, runs=runs)
        wished = parse_config(given)
        services = [one.suited(self._supervisor.launcher.machines) for one in wanted_models(wished, given)]
        after = together(wished, services)
        if after.nats.url is None and config.nats.url is not None:
            after = with_nats_url(after, config.nats.url)
        refuse(config, after)
        running = {one.config.namespace: one for one in wanted_models(config, {})}
        for service in services:
            if service.config.namespace in running:
                refuse_other_tokens(running[service.config.namespace], service)
        return after

    async def _carry_out(self, config: ServingConfig, generation: Generation) -> None:
        try:
            async with self._planner.aside(UNDER_WAY):
                await roll_out(self._supervisor, config, generation, self._first, self._tell)
            self._tell("the roll-out has ended: all processes are as wanted", event="rolled_out")
        except BatonError as error:
            self._problem = str(error)[:MAX_TEXT]
        except Exception as fault:  # our own: whoever follows must hear of it
            log.exception("the roll-out failed")
            self._problem = f"failed: {fault!r}"[:MAX_TEXT]
        finally:
            self._order = None

    def _tell(self, line: str, *, event: str, **fields: Any) -> None:
        self._news.append(News(line[:MAX_TEXT], event, fields))
        self._tell_all(line, event=event, **fields)


def _weights(config: ServingConfig) -> dict[str, str]:
    return {one.namespace: weights_state(served_model(one)) for one in models_of(config)}
