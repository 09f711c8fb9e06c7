"""Runs rounds: asks, strikes, waits, and compares with the oracle."""

import asyncio
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.chaos.asking import ask, weights
from tests.chaos.faults import strike_in, usable
from tests.chaos.hostile.effect import MOST_BYTES, note_memory
from tests.chaos.judging import leaks
from tests.chaos.judging.tally import Tally
from tests.chaos.judging.verdict import Expected, Judged, Outcome, Verdict, is_crossed, judge_any
from tests.chaos.plan import Ask, Round, plan_round
from tests.chaos.service.fleet import Fleet, pair, running_fleet
from tests.chaos.service.oracle import Oracle, running_oracle
from tests.chaos.service.rolling import NEXT, RollingFleet, models_of
from tests.chaos.service.scenarios import Device, Engine, Scenario, scenario_of
from tests.tiny_model import write_tiny_model

SLOW_ROUND_S = 10.0
MOST_TIMES_SLOWER = 20.0  # under attack than in peace, all requests of a round together
QUIET_S = 0.5  # that they take in peace, at least
FIRST_SEED = 3  # of several models, whose likeliest tokens are far apart
LOOK_EVERY = 10  # rounds between two looks at descriptors, memory and trees


@dataclass
class Game:
    """`seed`, `first`: which rounds. `names`: scenarios that take turns. `without`: faults that are never drawn.

    `go_on(number)`: whether another round is to be played. `tell`: hears a line per stretch, slow round and failure.
    `note`: hears now and then how far the game is.
    """

    seed: int
    names: tuple[str, ...]
    folder: Path
    go_on: Callable[[int], bool]
    tell: Callable[[str], None]
    first: int = 0
    without: tuple[str, ...] = ()
    note: Callable[[Tally], None] = lambda tally: None
    device: Device = "cpu"
    _struck: str = ""  # in the round that is played
    tally: Tally = field(default_factory=Tally)
    _oracles: dict[str, Oracle] = field(default_factory=dict)  # by model
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def play(self) -> Tally:
        number = self.first
        async with self._stack:
            while self.go_on(number):
                number = await self._stretch(number, scenario_of(number, self.names))
        return self.tally

    async def _stretch(self, number: int, scenario: Scenario) -> int:
        """Plays rounds of one scenario with one fleet; returns the number of the round after."""
        odds, why_not = usable(scenario)
        odds = [one for one in odds if one.name not in self.without]
        self.tally.skipped |= why_not | dict.fromkeys(self.without, "left out by --without")
        start_s, first = time.monotonic(), number
        looks: list[leaks.Look] = []
        fleet: Fleet | None = None
        try:
            models = self._models(scenario)
            oracles = [await self._oracle(scenario.engine, model) for model in models]
            async with running_fleet(
                scenario, self.folder / f"{scenario.name}-{first}", models[0], self.device
            ) as fleet:
                while self.go_on(number) and scenario_of(number, self.names) is scenario:
                    plan = plan_round(self.seed, number, scenario, odds, weights(scenario.shares_ports))
                    await (self._attacked if scenario.hostile else self._round)(fleet, plan, oracles)
                    number += 1
                    if number % LOOK_EVERY == 0:
                        await self._look(fleet, number, looks)
                        self.note(self.tally)
                await self._look(fleet, number, looks)
        except TimeoutError as error:
            self._fail(number, scenario, f"the service did not recover: {error}")
            number += 1
        except AssertionError as error:
            self._fail(number, scenario, str(error))
            number += 1
        except Exception as error:  # a fault of ours: the rounds of other scenarios are still worth playing
            traceback.print_exc()
            self._fail(number, scenario, f"tests/chaos itself failed: {error!r}")
            number += 1
        grown = leaks.growth(looks, MOST_BYTES if scenario.hostile else leaks.MORE_BYTES)
        self.tally.grown.append(grown)
        left = fleet.left_files if fleet else []
        self.tally.leaked["files"] += len(left)
        for problem in [*grown.problems, *(fleet.problems if fleet else []), *(f"left behind: {one}" for one in left)]:
            self._fail(number, scenario, problem)
        self.tally.deaths += fleet.deaths if fleet else 0
        self.tally.wakes += fleet.wakes if fleet else 0
        seconds = time.monotonic() - start_s
        self.tally.seconds_of[scenario.name] += round(seconds)
        self.note(self.tally)
        self.tell(f"{scenario.name:<12} rounds {first}-{number - 1} in {seconds:5.1f} s   {self.tally.line()}")
        return number

    async def _attacked(self, fleet: Fleet, plan: Round, oracles: Sequence[Oracle]) -> None:
        """The round in peace, and then as it is planned: strangers may make honest requests a little slower."""
        quiet_s = await self._round(fleet, replace(plan, strikes=()), oracles)
        note_memory(fleet)
        attacked_s = await self._round(fleet, plan, oracles)
        self.tally.most_mib_more = max(self.tally.most_mib_more, fleet.most_more_bytes >> 20)
        self.tally.to_strangers += fleet.to_strangers
        fleet.to_strangers.clear()
        times = attacked_s / max(quiet_s, QUIET_S)
        self.tally.most_times_slower = max(self.tally.most_times_slower, round(times, 1))
        if times > MOST_TIMES_SLOWER:
            self._fail(plan.number, fleet.scenario, f"requests took {attacked_s:.1f} s, and {quiet_s:.1f} s in peace")

    async def _round(self, fleet: Fleet, plan: Round, oracles: Sequence[Oracle]) -> float:
        """Returns the seconds that its requests took, added up."""
        self._struck = ", ".join(f"{strike.fault} at {strike.at_s} s for {strike.hold_s} s" for strike in plan.strikes)
        await fleet.until_useful()
        routers = [router.name for router in fleet.of("router")]
        if fleet.scenario.hostile and plan.strikes:
            fleet.under_attack.clear()

        async def one(what: Ask) -> Outcome:
            await fleet.under_attack.wait()
            await asyncio.sleep(what.at_s)
            return await ask(fleet.doors[routers[what.router % len(routers)]], what)

        shared = (
            [name for name, kind in fleet.known.items() if kind == "router"] if fleet.scenario.shares_ports else None
        )

        start_s = time.monotonic()
        strikes = [asyncio.create_task(strike_in(fleet, strike)) for strike in plan.strikes]
        names = fleet.scenario.models
        able = [oracles if not names else [oracles[names.index(what.model)]] for what in plan.asks]
        expected = [
            asyncio.gather(*(oracle.answer(what) for oracle in those))
            for those, what in zip(able, plan.asks, strict=True)
        ]
        outcomes = await asyncio.gather(*(one(what) for what in plan.asks))
        await asyncio.gather(*strikes)
        for outcome, right in zip(outcomes, await asyncio.gather(*expected), strict=True):
            judged = _judged(fleet, outcome, right, shared)
            if judged.verdict is Verdict.WRONG and names:
                others = [await oracle.answer(outcome.ask) for oracle in oracles]
                judged = Judged(Verdict.CROSSED, judged.why) if is_crossed(outcome, others) else judged
            if self.tally.count(outcome, judged):
                self._fail(plan.number, fleet.scenario, f"{outcome.ask.way}: {judged.verdict}: {judged.why}")
        for strike in plan.strikes:
            self.tally.faults[strike.fault] += 1
        self.tally.rounds_of[fleet.scenario.name] += 1
        ended_s = time.monotonic()
        await self._idle(fleet, plan.number)
        whole_s, idle_s = time.monotonic() - start_s, time.monotonic() - ended_s
        if whole_s > SLOW_ROUND_S:
            self.tell(
                f"slow: round {plan.number} took {whole_s:.1f} s, {idle_s:.1f} s of it until idle ({self._struck})"
            )
        return sum(outcome.end_s - outcome.start_s for outcome in outcomes)

    async def _look(self, fleet: Fleet, number: int, looks: list[leaks.Look]) -> None:
        """When all are back and idle."""
        await fleet.until_whole()
        await self._idle(fleet, number)
        for problem in await leaks.until_trees_are_right(fleet):
            self._fail(number, fleet.scenario, problem)
        looks += leaks.look(fleet, number)

    async def _idle(self, fleet: Fleet, number: int) -> None:
        """A worker that leaks is told of once: it starts again, so that the next rounds can find something else."""
        while fleet.problems:
            self._fail(number, fleet.scenario, fleet.problems.pop(0))
        for worker_id, left in (await leaks.until_idle(fleet)).items():
            self.tally.leaked.update(blocks=left.blocks, leases=left.leases)
            self._fail(number, fleet.scenario, f"{worker_id}: {left.problem}")
            fleet.members[worker_id].expected_end = True
            await fleet.members[worker_id].kill()

    async def _oracle(self, engine: Engine, model: str) -> Oracle:
        if model not in self._oracles:
            if model.endswith(NEXT) and not Path(model).exists():
                write_tiny_model(Path(model), seed=1)
            folder = self.folder / f"oracle-{engine}-{len(self._oracles)}"
            context = running_oracle(engine, folder, model, self.device)
            self._oracles[model] = await self._stack.enter_async_context(context)
        return self._oracles[model]

    def _models(self, scenario: Scenario) -> Sequence[str]:
        """Their folders: of several models, or of the generations of one."""
        if scenario.rolls:
            return models_of(self._model(scenario.engine))
        if not scenario.models:
            return (self._model(scenario.engine),)
        named = {self.folder / name: seed for seed, name in enumerate(scenario.models, FIRST_SEED)}
        return [str(path if path.exists() else write_tiny_model(path, seed=seed)) for path, seed in named.items()]

    def _model(self, engine: Engine) -> str:
        if engine == "mock":
            return "mock"
        if engine == "vllm":  # which has no attention for smaller heads on a CPU
            folder = self.folder / "tiny-llama-of-wide-heads"
            return str(folder if folder.exists() else write_tiny_model(folder, head_dim=32))
        folder = self.folder / "tiny-llama"
        return str(folder if folder.exists() else write_tiny_model(folder))

    def _fail(self, number: int, scenario: Scenario, what: str) -> None:
        self.tally.failures.append(f"seed {self.seed} round {number} scenario {scenario.name} ({self._struck}): {what}")
        self.tell(f"FAILED  {self.tally.failures[-1]}")


def _judged(fleet: Fleet, outcome: Outcome, right: Sequence[Expected], shared: list[str] | None) -> Judged:
    """An answer that has begun needs workers of its own generation, where there are several."""
    decode, workers = fleet.decode_and_all(outcome.router, outcome.ask.model)
    able = [decode] * len(right)
    if isinstance(fleet, RollingFleet) and (outcome.tokens or outcome.text):
        able = [[pair(outcome.router, name) for name in fleet.decoding(one)] for one in range(len(right))]
    return judge_any(outcome, list(zip(right, able, strict=True)), fleet.timeline, workers, shared)
