"""The planner's loop: observe, decide, write to the journal, begin the actions; once per interval.

Because observer, connector and clock are arguments, the same loop runs live and in simulated time. It never waits for
an effect: effects in flight are part of the next observation.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog
from msgspec.structs import replace

from baton_proto.planner import MAJOR, Observation, Target
from planner.acting.connector import Connector
from planner.acting.effects import Effects
from planner.journal import Decided, Line, Started
from planner.planner import Planner
from planner.policy.observation import gpus_held
from planner.shared_budget import Member
from runtime.config.planner import PlannerConfig
from runtime.errors import BatonError

Observer = Callable[[], Awaitable[Observation]]

log = structlog.get_logger()


class PlannerLoop:
    """`write` receives the journal's lines, `save` the planner's memory after each decision. While `held` says why, the
    loop decides and carries out nothing. `shared`: the budget that other models' planners take from, too."""

    def __init__(
        self,
        config: PlannerConfig,
        planner: Planner,
        observe: Observer,
        connector: Connector,
        *,
        clock: Callable[[], float] = time.time,
        write: Callable[[Line], None] = lambda line: None,
        save: Callable[[bytes], Awaitable[object]] | None = None,
        held: Callable[[], str] = lambda: "",
        shared: Member | None = None,
    ) -> None:
        self.config = config
        self._planner = planner
        self._observe = observe
        self._clock = clock
        self._write = write
        self._save = save
        self.held = held
        self._shared = shared
        self.effects = Effects(connector, config.start_s, clock, write)
        self.last: Decided | None = None
        self.problem = ""  # why the last step observed nothing

    async def run(self) -> None:
        """Decides once per interval until it is cancelled."""
        self._write(Started(self._clock(), MAJOR, self.config.policy))
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        try:
            while True:
                await self.step()
                next_s = max(next_s + self.config.interval_s, loop.time())  # after a late step, do not catch up
                await asyncio.sleep(next_s - loop.time())
        finally:
            await self.effects.close()

    async def step(self) -> Target | None:
        """One decision and the beginning of its actions; None, and no change, when nothing could be observed."""
        try:
            observation = self.effects.shown_in(await self._observe())
        except BatonError as error:
            self.problem = str(error)
            log.warning("nothing observed, nothing decided", error=self.problem)
            return None
        self.problem = ""
        if self._shared is None:
            return await self._decide(observation)
        async with self._shared.turn:
            target = await self._decide(replace(observation, gpu_share=self._shared.share(gpus_held(observation))))
            self._shared.claim(self._planner.claim)
            return target

    async def _decide(self, observation: Observation) -> Target:
        began_s = time.perf_counter()
        target = self._planner.decide(observation)
        if held := self.held():
            target = replace(target, reasons=[*target.reasons, f"{held}: nothing is done"])
        duration_ms = (time.perf_counter() - began_s) * 1e3
        self.last = Decided(observation.time_s, observation, target, duration_ms, bool(held))
        self._write(self.last)
        for action in target.actions:
            log.info("plan", verb=action.verb, worker=action.worker_id, role=action.role, reason=action.reason)
        if self._save is not None:
            await self._save(self._planner.saved())  # before the effects begin, so that a restarted planner knows them
        if not held and not self.held():
            # While the memory was saved, an operator may have begun another effect.
            self.effects.begin([one for one in target.actions if one.worker_id not in self.effects.running])
        return target
