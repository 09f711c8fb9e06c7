"""A team's day: five models that sleep until somebody asks, on half of the GPUs that one model each would take.

    python -m benchmarks.models_day [--gpus 3] [--per-hour 300] [--seeds 0,1,2] [--trace FILE.jsonl] [--json FILE]

Simulated time, real decisions: who falls asleep for whom is planner/policy/swap.py, and which GPUs a model gets is
baton/service/gpu_places.py, as in a live service. People come in sessions: each asks one model, drawn by Zipf's law,
some ten times, and reads in between. The hours of a working day have different rates, and in bursts several sessions
begin at once. Steps take what serving.yaml's `step_times` say; waking takes what an 8B model took on an H200
(results/sleep-8b.json), and so does falling asleep at level 2: after its first sleep a model's weights are in host
memory already. With `engine.host_kv_memory` its KV goes there, too. `--trace` writes the requests of the first seed, a
line of JSON each.

Goal: 95 % of the requests have their first token within planner.targets.ttft_ms, 1.0 s. Exit code 1 when it is missed.
Beside it stands what the same requests would find if a model could wake on whatever GPUs are free (a worker keeps those
that it has started on, and waits there for the answers of others), and without `engine.host_kv_memory`.
"""

import argparse
import asyncio
import itertools
import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from baton.service.gpu_places import VISIBLE, GpuPlaces
from benchmarks.machine import describe, write_result
from benchmarks.planner.event_loop import run_simulated
from planner.policy.swap import Swap, Tenant, make_room
from runtime.config.planner import TargetsConfig
from runtime.config.step_times import StepTimes, token_pairs

GOAL: Final = 0.95
SIZES: Final = {"large": 2, "code": 1, "chat": 1, "mail": 1, "small": 1}  # GPUs of each model, the most wanted first
HOURS: Final = (0.3, 0.8, 1.4, 1.3, 0.6, 1.0, 1.5, 1.3, 0.9, 0.4)  # of a working day: rates, 1 in the mean or so
ASKED, READ_S, TOKENS_IN, TOKENS_OUT = 10, 25.0, 900, 220  # of a session in the mean, and its requests in the median
MOST_CONTEXT: Final = 16_000  # tokens
BURSTS, IN_BURST = 0.1, 5  # of ten beginnings one is of so many sessions for one model
TOKEN_S: Final = 0.006  # of an answer, as its reader expects it
TIMES: Final = StepTimes()
SLEEP_S, WAKE_S, WAKE_AT_ONCE_S = 0.06, 0.34, 0.66  # at once: the driver clears what others have just given back
KV_TOKEN_S: Final = 147_456 / 52.6e9  # between an 8B model's GPU and its host memory (results/host-tier-8b.json)
IDLE_S, LOOK_S, AGAIN_S = 60.0, 1.0, 0.1  # as in a live service


class Asked(Struct, frozen=True):
    at_s: float
    model: str
    session: int
    context: int  # tokens that the session has said and heard before
    tokens_in: int  # new ones
    tokens_out: int


class Outcome(Struct, frozen=True):
    seed: int
    requests: int
    in_time: float  # share
    p50_s: float  # time to first token
    p99_s: float
    wakes: int
    anywhere: float  # share in time where a model wakes on any GPUs
    forgetful: float  # and where KV is gone with each sleep
    alone: float  # and where each model has GPUs of its own
    of_model: dict[str, float]  # share in time


def day(seed: int, per_hour: float) -> list[Asked]:
    rng = random.Random(seed)
    weights = [1 / rank for rank in range(1, len(SIZES) + 1)]
    asked: list[Asked] = []
    numbers = itertools.count()
    for hour, rate in enumerate(HOURS):
        begins_per_s = rate * per_hour / ASKED / (1 + BURSTS * (IN_BURST - 1)) / 3600
        at_s = 0.0
        while (at_s := at_s + rng.expovariate(begins_per_s)) < 3600:
            (model,) = rng.choices(list(SIZES), weights)
            for _ in range(IN_BURST if rng.random() < BURSTS else 1):
                asked += _session(rng, next(numbers), model, 3600 * hour + at_s + rng.uniform(0, 60))
    return sorted(asked, key=lambda one: one.at_s)


def _session(rng: random.Random, session: int, model: str, at_s: float) -> list[Asked]:
    """A conversation: each request brings what was said before."""
    asked: list[Asked] = []
    context = 0
    for _ in range(1 + int(rng.expovariate(1 / (ASKED - 0.5)))):
        new, answer = (max(8, int(rng.lognormvariate(0, 0.7) * median)) for median in (TOKENS_IN, TOKENS_OUT))
        asked.append(Asked(at_s, model, session, context, new, answer))
        context = min(context + new + answer, MOST_CONTEXT)
        at_s += answer * TOKEN_S + rng.expovariate(1 / READ_S)
    return asked


class Model:
    """One worker. Prompts run one after the other; answers share the steps. `keeps_kv`: a sleep moves the KV of all
    sessions to host memory, which has room for it; otherwise it forgets them."""

    def __init__(self, name: str, holds: Counter[str], *, keeps_kv: bool) -> None:
        self.name = name
        self.is_awake = self.is_waking = False
        self.waking: asyncio.Task[None] | None = None
        self._holds = holds
        self._keeps_kv = keeps_kv
        self._running = 0
        self._was_busy = self._was_used = False  # at the last report, and since then
        self._used_s = self._woken_s = -math.inf
        self._wake_took_s = 0.0
        self._on_device: dict[int, int] = {}  # tokens of each session
        self._on_host: set[int] = set()
        self._prompts = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()

    def tenant(self, now_s: float) -> Tenant:
        return Tenant(
            self.name,
            self._holds,
            is_awake=self.is_awake or self.is_waking,
            sleeps=not self.is_waking,
            idle_s=0.0 if self._was_busy else now_s - self._used_s,
            awake_s=now_s - self._woken_s,
            wake_took_s=self._wake_took_s,
            has_served=self._used_s > self._woken_s,
        )

    def report(self, now_s: float) -> None:
        """The policy knows what workers report once a second."""
        self._was_busy = self._running > 0
        if self._was_busy or self._was_used:
            self._used_s = now_s
        self._was_used = False

    async def begin(self, asked: Asked) -> asyncio.Task[None]:
        """Returns with the first token: what is left of the answer."""
        self._running += 1
        self._was_used = True
        self._idle.clear()
        async with self._prompts:
            lowered = asked.context if asked.session in self._on_host else 0
            known = asked.context if asked.session in self._on_device else lowered
            new = asked.context + asked.tokens_in - known
            self._on_host.discard(asked.session)
            self._on_device[asked.session] = known + new + asked.tokens_out
            await asyncio.sleep(lowered * KV_TOKEN_S + TIMES.prefill_ms(new, token_pairs(known, new)) / 1e3)
        return asyncio.create_task(self._go_on(asked))

    async def _go_on(self, asked: Asked) -> None:
        for _ in range(4):  # the others come and go meanwhile
            step_ms = TIMES.decode_ms(self._running, self._running * (asked.context + asked.tokens_in))
            await asyncio.sleep(asked.tokens_out / 4 * step_ms / 1e3)
        self._running -= 1
        if not self._running:
            self._idle.set()

    async def sleep(self) -> None:
        self.is_awake = False  # new requests wait until it wakes again
        await self._idle.wait()
        await asyncio.sleep(SLEEP_S)
        if self._keeps_kv:
            await asyncio.sleep(KV_TOKEN_S * sum(self._on_device.values()))
            self._on_host |= self._on_device.keys()
        self._on_device.clear()

    async def wake(self, took_s: float) -> None:
        await asyncio.sleep(took_s)
        self.is_awake, self.is_waking, self._wake_took_s = True, False, took_s
        self._used_s = self._woken_s = asyncio.get_running_loop().time()


class Team:
    """As `Sleepers`: one model at a time makes room. `anywhere`: whatever GPUs a model wakes on."""

    def __init__(self, num_gpus: int, *, anywhere: bool, keeps_kv: bool) -> None:
        gpus = [str(number) for number in range(num_gpus)]
        places = GpuPlaces(gpus, [], [(size, name) for name, size in SIZES.items()])
        holds = {
            name: Counter({"": size} if anywhere else places.next(size, name)[VISIBLE].split(","))
            for name, size in SIZES.items()
        }
        self.models = {name: Model(name, held, keeps_kv=keeps_kv) for name, held in holds.items()}
        self.wakes = 0
        self._room = Counter({"": num_gpus} if anywhere else gpus)
        self._turn = asyncio.Lock()

    async def ask(self, asked: Asked) -> tuple[float, asyncio.Task[None]]:
        """The time to the first token, and what is left of the answer."""
        loop, model = asyncio.get_running_loop(), self.models[asked.model]
        began_s = loop.time()
        while not model.is_awake:
            if model.waking is None or model.waking.done():
                model.waking = asyncio.create_task(self._wake(model))
            await asyncio.shield(model.waking)
        left = await model.begin(asked)
        return loop.time() - began_s, left

    async def _wake(self, model: Model) -> None:
        while True:
            async with self._turn:
                now_s = asyncio.get_running_loop().time()
                others = [one.tenant(now_s) for one in self.models.values() if one is not model]
                decision = make_room(model.tenant(now_s), others, self._room)
                if isinstance(decision, Swap):
                    await asyncio.gather(*(self.models[name].sleep() for name in decision.asleep))
                    model.is_waking = True
                    break
            await asyncio.sleep(AGAIN_S)
        await model.wake(WAKE_AT_ONCE_S if decision.asleep else WAKE_S)
        self.wakes += 1

    async def sleep_when_idle(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            now_s = asyncio.get_running_loop().time()
            for model in self.models.values():
                model.report(now_s)
                if model.is_awake and model.tenant(now_s).idle_s >= IDLE_S:
                    async with self._turn:
                        if model.is_awake and model.tenant(asyncio.get_running_loop().time()).idle_s >= IDLE_S:
                            await model.sleep()


async def run(
    trace: Sequence[Asked], num_gpus: int, *, anywhere: bool = False, keeps_kv: bool = True
) -> tuple[list[float], int]:
    """The times to first tokens, and how often a model woke."""
    team = Team(num_gpus, anywhere=anywhere, keeps_kv=keeps_kv)
    watch = asyncio.create_task(team.sleep_when_idle())

    async def one(asked: Asked) -> float:
        await asyncio.sleep(asked.at_s)
        ttft_s, left = await team.ask(asked)
        await left
        return ttft_s

    ttft_s = await asyncio.gather(*map(one, trace))
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    return ttft_s, team.wakes


def outcome(seed: int, trace: Sequence[Asked], num_gpus: int) -> Outcome:
    target_s = TargetsConfig().ttft_ms / 1e3
    ttft_s, wakes = run_simulated(run(trace, num_gpus))
    free_s, _ = run_simulated(run(trace, num_gpus, anywhere=True))
    forgot_s, _ = run_simulated(run(trace, num_gpus, keeps_kv=False))
    own_s, _ = run_simulated(run(trace, sum(SIZES.values())))
    late = Counter(asked.model for asked, took_s in zip(trace, ttft_s, strict=True) if took_s > target_s)
    asked = Counter(asked.model for asked in trace)
    return Outcome(
        seed,
        len(trace),
        1 - late.total() / len(trace),
        statistics.median(ttft_s),
        statistics.quantiles(ttft_s, n=100)[98],
        wakes,
        sum(took_s <= target_s for took_s in free_s) / len(trace),
        sum(took_s <= target_s for took_s in forgot_s) / len(trace),
        sum(took_s <= target_s for took_s in own_s) / len(trace),
        {name: 1 - late[name] / max(1, asked[name]) for name in SIZES},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=sum(SIZES.values()) // 2)
    parser.add_argument("--per-hour", type=float, default=300.0, help="requests, in the mean of the day")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    traces = {seed: day(seed, options.per_hour) for seed in seeds}
    if options.trace is not None:
        options.trace.write_bytes(msgspec.json.Encoder().encode_lines(traces[seeds[0]]))
    outcomes = [outcome(seed, trace, options.gpus) for seed, trace in traces.items()]
    table = Table("", title=f"{len(SIZES)} models on {options.gpus} of {sum(SIZES.values())} GPUs")
    for one in outcomes:
        table.add_column(f"seed {one.seed}", justify="right")
    table.add_row("requests", *(str(one.requests) for one in outcomes))
    table.add_row("in time", *(f"{one.in_time:.1%}" for one in outcomes))
    for name, size in SIZES.items():
        table.add_row(f"  {name}, {size} GPU", *(f"{one.of_model[name]:.1%}" for one in outcomes))
    table.add_row("  if it woke on any GPUs", *(f"{one.anywhere:.1%}" for one in outcomes))
    table.add_row("  without a host tier", *(f"{one.forgetful:.1%}" for one in outcomes))
    table.add_row("  with GPUs of its own", *(f"{one.alone:.1%}" for one in outcomes))
    table.add_row("TTFT p50, p99 in s", *(f"{one.p50_s:.3f}, {one.p99_s:.2f}" for one in outcomes))
    table.add_row("wakes", *(str(one.wakes) for one in outcomes))
    Console().print(table)
    if options.json is not None:
        head = {"benchmark": "models_day", **describe(), "goal": GOAL, "gpus": options.gpus, "sizes": SIZES}
        write_result(options.json, {**head, "per_hour": options.per_hour, "outcomes": msgspec.to_builtins(outcomes)})
    sys.exit(min(one.in_time for one in outcomes) < GOAL)


if __name__ == "__main__":
    main()
