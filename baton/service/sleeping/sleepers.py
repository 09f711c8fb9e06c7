"""Wakes the workers of a model when a router asks for them, and puts idle ones to sleep: only here is known what all
models hold together."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from baton.service.planning.budget import gpu_budget
from baton.service.sleeping.model_workers import ModelWorkers
from baton.service.supervisor import Supervisor
from baton.service.telling import Tell
from baton_proto.decoding import MAX_TEXT
from baton_proto.waking import MAJOR, Answer, Outcome, Question, decode_question, encode
from planner.journal import JOURNAL_BYTES, Journal, Swapped
from planner.policy.swap import Swap, Tenant, Wait, make_room
from runtime.calls.over_nats import answered
from runtime.checkpoint.served_model import is_mock
from runtime.config.models import entries_of, models_of
from runtime.end_task import end_tasks
from runtime.errors import BatonError
from runtime.nats.client import connect
from runtime.nats.subjects import wake_subject

LOOK_S: Final = 1.0  # between two looks for idle models, as often as their workers report
AGAIN_S: Final = 0.1  # until one for which there was no room is looked at again

log = structlog.get_logger()


class Sleepers:
    """A context in which routers are answered. `tell` hears who falls asleep and wakes."""

    def __init__(self, supervisor: Supervisor, tell: Tell) -> None:
        self._supervisor = supervisor
        self._tell = tell
        self._models: list[ModelWorkers] = []
        self._journal: Journal | None = None
        self._turn = asyncio.Lock()  # one model at a time finds room, and others fall asleep for it
        self._waking: dict[str, asyncio.Task[Outcome]] = {}  # by model; each holds its room
        self._closing = AsyncExitStack()

    async def __aenter__(self) -> "Sleepers":
        """Raises UnavailableError when NATS does not answer, ConfigError when the journal cannot be written."""
        config, keys = self._supervisor.config, self._supervisor.keys
        assert config.nats.url is not None, "not started"
        if config.models and config.planner.journal is not None:
            self._journal = Journal(Path(config.planner.journal), JOURNAL_BYTES)
            self._closing.callback(self._journal.close)
        nats = await connect(config.nats.url, "sleepers", config.namespace, config.workers.ready_timeout_s, keys.nats)
        self._closing.push_async_callback(nats.close)
        self._models = [
            ModelWorkers(entry, nats.within(one.namespace), self._supervisor)
            for entry, one in zip(entries_of(config), models_of(config), strict=True)
        ]
        for model in self._models:
            await model.start()
            self._closing.push_async_callback(model.close)
            await nats.answer(wake_subject(model.namespace), partial(self._answer, model))
        task = asyncio.create_task(self._watch_idle(), name="idle models")
        self._closing.push_async_callback(lambda: end_tasks(task, *self._waking.values()))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._closing.aclose()

    def kept(self) -> int:
        """GPUs that are not for other models: those where workers of models that sleep are, and without GPUs enough for
        the largest of these models, or for those that are awake."""
        sleepers = [model for model in self._models if model.entry.sleeps]
        awake = sum((self._holds(model) for model in sleepers if self._is_up(model)), Counter[str]())
        places = Counter[str]()
        for model in sleepers:
            places |= self._holds(model)
        return max(awake.total(), places.total())

    async def _answer(self, model: ModelWorkers, data: bytes) -> bytes:
        return encode(Answer(MAJOR, await answered("supervisor", data, decode_question, partial(self._wake, model))))

    async def _wake(self, model: ModelWorkers, asked: Question) -> Outcome:
        deadline_s, problem = time.monotonic() + asked.timeout_s, "other models wake first"
        while time.monotonic() < deadline_s:
            async with self._turn:
                if time.monotonic() >= deadline_s:
                    break  # whoever asked has left
                waking = self._waking.get(model.entry.name)
                if waking is None:
                    if model.can_answer:
                        return Outcome("awake")
                    if not model.can_wake:
                        return Outcome("none")
                    decision = self._room_for(model)
                    if isinstance(decision, Swap):
                        waking = await self._swap(model, decision, max(0.0, deadline_s - time.monotonic()))
                    else:
                        problem = decision.reason
            if waking is not None:
                return await asyncio.shield(waking)
            await asyncio.sleep(AGAIN_S)
        return Outcome("busy", problem)

    async def _swap(self, model: ModelWorkers, swap: Swap, left_s: float) -> asyncio.Task[Outcome]:
        """Requests of those that fall asleep have `left_s` to end. The model wakes in the task that is returned."""
        began_s, name = time.time(), model.entry.name
        others = [one for one in self._models if one.entry.name in swap.asleep]
        slept = await asyncio.gather(
            *(self._sleep(one, left_s, f"{name} is asked for") for one in others), return_exceptions=True
        )
        failed = next(filter(None, slept), None)
        if failed is not None and not isinstance(failed, BatonError):
            raise failed
        task = asyncio.create_task(self._finish(model, swap, began_s, failed), name=f"{name} wakes")
        self._waking[name] = task
        task.add_done_callback(lambda _: self._waking.pop(name))
        return task

    async def _finish(self, model: ModelWorkers, swap: Swap, began_s: float, failed: BatonError | None) -> Outcome:
        """failed: why one stays awake that was to make room."""
        outcome = Outcome("awake")
        if failed is not None:
            outcome = Outcome("busy", str(failed)[:MAX_TEXT])
        else:
            try:
                await model.wake()
            except BatonError as error:
                outcome = Outcome("failed", str(error)[:MAX_TEXT])
        self._note(model, swap, began_s, outcome)
        return outcome

    async def _watch_idle(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for model in self._models:
                if self._is_idle(model):
                    async with self._turn:
                        if self._is_idle(model):
                            await self._idle_sleep(model)

    def _is_idle(self, model: ModelWorkers) -> bool:
        is_waking = model.entry.name in self._waking
        return model.entry.sleeps and model.is_awake and not is_waking and model.idle_s >= model.entry.idle_s

    def _is_up(self, model: ModelWorkers) -> bool:
        """Whether its room is taken."""
        return model.is_awake or model.entry.name in self._waking

    async def _idle_sleep(self, model: ModelWorkers) -> None:
        try:
            await self._sleep(model, self._supervisor.config.workers.drain_timeout_s, f"idle for {model.idle_s:.0f} s")
        except BatonError as error:
            log.warning("an idle model stays awake", model=model.entry.name, reason=str(error))

    async def _sleep(self, model: ModelWorkers, drain_s: float, why: str) -> None:
        """Raises BatonError."""
        await model.sleep(drain_s)
        self._tell(f"{model.entry.name} sleeps: {why}", event="asleep", model=model.entry.name, why=why)

    def _room_for(self, model: ModelWorkers) -> Swap | Wait:
        """Workers that an operator has put to sleep find the room that they had."""
        if not model.entry.sleeps:
            return Swap()
        others = [self._tenant(other) for other in self._models if other is not model]
        return make_room(self._tenant(model), others, self._room())

    def _tenant(self, model: ModelWorkers) -> Tenant:
        return Tenant(
            name=model.entry.name,
            holds=self._holds(model),
            priority=model.entry.priority,
            is_awake=self._is_up(model),
            sleeps=model.entry.sleeps and model.entry.name not in self._waking,
            idle_s=model.idle_s,
            awake_s=model.awake_s,
            wake_took_s=model.wake_took_s,
            has_served=model.has_served,
        )

    def _holds(self, model: ModelWorkers) -> Counter[str]:
        """GPUs by name; where there are none, as many shares of the cores. The mock engine needs neither."""
        children = self._supervisor.children
        held = Counter[str]()
        for name in {*children.living_of(), *children.starting, *model.lost}:
            launch = children.launches[name]
            if launch.config.namespace == model.namespace and not is_mock(launch.config):
                held.update(children.places.get(name) or {"": launch.ranks})
        return held

    def _room(self) -> Mapping[str, int]:
        launcher = self._supervisor.launcher
        budget, gpus = gpu_budget(self._supervisor.config, launcher.machines), launcher.machines.gpus
        each = max(1, budget // max(1, gpus))
        return Counter({place: each for one in self._models for place in self._holds(one)}) | Counter({"": budget})

    def _note(self, model: ModelWorkers, swap: Swap, began_s: float, outcome: Outcome) -> None:
        name, duration_s = model.entry.name, time.time() - began_s
        if outcome.state == "awake":
            self._tell(f"{name} is awake after {duration_s:.2f} s", event="awake", model=name, seconds=duration_s)
        log.info("a model was asked for", model=name, outcome=outcome.state, problem=outcome.problem, slept=swap.asleep)
        if self._journal is not None:
            line = Swapped(time.time(), name, list(swap.asleep), swap.reason, duration_s, outcome.problem)
            try:
                self._journal.write(line)
            except OSError as error:
                log.warning("journal not written", error=str(error))
