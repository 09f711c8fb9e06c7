"""A service with a live planner, for tests: real processes, mock engines, and the planner's journal to look at.

async with planned_service(tmp_path, prefill=1, decode=1, planner={"policy": "slo"}) as planned:
    await planned.until(lambda: planned.wanted(PREFILL) == 2)
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from baton.service.planning.live_planner import live_planner
from baton_proto.generated import inference_pb2 as pb
from baton_proto.planner import Role
from baton_proto.planner_control import Order, Release, Scale
from planner.journal import Decided, EffectEnded, Line, read_journal
from runtime.calls.planner import tell_planner
from runtime.calls.router import Client
from tests.service import Service, running_service

POLL_S = 0.1
WAIT_S = 30.0
PROMPT_TOKENS = 500  # a byte is a token
PLANNER: dict[str, Any] = {
    "enabled": True,
    "interval_s": 1.0,
    "limits": {"max_prefill": 4, "max_decode": 4},
}
STEP_TIMES = {  # 100 ms for a prompt: ten of them per second and worker
    "prefill_token_ms": 0.2,
    "decode_floor_ms": 10.0,
    "decode_sequence_ms": 0.5,
}
PACE = {"pace.DOWN_COOLDOWN_S": 1.0, "pace.REVERSAL_S": 2.0}


@dataclass
class Planned:
    service: Service
    journal: Path
    _planner: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def start_planner(self) -> None:
        """Returns when it listens."""
        ready = asyncio.Event()
        supervisor = self.service.supervisor

        def tell(line: str, *, event: str, **fields: Any) -> None:
            if event == "planner":
                ready.set()

        await self._planner.enter_async_context(live_planner(supervisor, tell))
        await asyncio.wait_for(ready.wait(), WAIT_S)

    async def kill_planner(self) -> None:
        """In mid-sentence, with all that it had under way."""
        await self._planner.aclose()

    def lines(self) -> list[Line]:
        return list(read_journal(self.journal)) if self.journal.exists() else []

    def decisions(self) -> list[Decided]:
        return [line for line in self.lines() if isinstance(line, Decided)]

    def effects(self, verb: str) -> list[EffectEnded]:
        return [line for line in self.lines() if isinstance(line, EffectEnded) and line.verb == verb]

    def last(self) -> Decided:
        return self.decisions()[-1]

    def ready(self, role: Role) -> list[str]:
        """As the planner sees it."""
        return [w.worker_id for w in self.last().observation.workers if w.role == role and w.state == "ready"]

    def count(self) -> tuple[int, int]:
        """Prefill and decode workers that the planner sees, when all of them are ready; else (-1, -1)."""
        if any(worker.state == "sleeping" for worker in self.last().observation.workers):
            return -1, -1
        return self.awake()

    def awake(self) -> tuple[int, int]:
        """As `count`, but sleepers may be there."""
        workers = [worker for worker in self.last().observation.workers if worker.state != "sleeping"]
        if any(worker.state != "ready" or worker.effect is not None for worker in workers):
            return -1, -1
        return len(self.ready("prefill")), len(self.ready("decode"))

    async def until(self, condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not (self.decisions() and condition()):
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            decisions = self.decisions()
            raise AssertionError(f"not so after {timeout_s:g} s: {decisions[-1] if decisions else None}") from None
        finally:
            self.service.note_pids()

    async def tell(self, order: Scale | Release | Order) -> str:
        nats = await self.service.connect_nats("test")
        try:
            return await tell_planner(nats, order, WAIT_S, self.service.supervisor.keys.operator[0])
        finally:
            await nats.close()


@asynccontextmanager
async def planned_service(
    folder: Path,
    prefill: int,
    decode: int,
    planner: dict[str, Any],
    model: str = "mock",
    constants: dict[str, float] | None = None,
    **sections: Any,
) -> AsyncIterator[Planned]:
    """`constants`: other values for those of modules in planner/policy/. The planner runs in this process."""
    journal = folder / "plan.jsonl"
    limits = PLANNER["limits"] | planner.pop("limits", {})
    settings = PLANNER | {"journal": str(journal)} | planner | {"limits": limits}
    sections = {
        "mock": {"answer_tokens": 16},
        "step_times": STEP_TIMES,
        "router": {"placement": {"local_prefill_tokens": 0}},
    } | sections
    async with AsyncExitStack() as closing:
        patch = closing.enter_context(pytest.MonkeyPatch.context())
        for name, value in (PACE | (constants or {})).items():
            patch.setattr(f"planner.policy.{name}", value)
        running = running_service(model, prefill, decode, planner=settings, **sections)
        service = await closing.enter_async_context(running)
        planned = Planned(service, journal)
        try:
            await planned.start_planner()
            yield planned
        finally:
            await planned.kill_planner()
            service.note_pids()


@dataclass(frozen=True, slots=True)
class Sent:
    at_s: float  # monotonic
    ttft_s: float


class Load:
    """Requests at a rate that may be changed, with prompts that no cache holds. Use `async with`."""

    def __init__(self, client: Client, rate: float) -> None:
        self.rate = rate
        self.answered: list[Sent] = []
        self.failures: list[BaseException] = []
        self._client = client
        self._dice = random.Random(1)
        self._running: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Load":
        self._task = asyncio.create_task(self._send())
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, *self._running, return_exceptions=True)

    def p90_ttft_s(self, since_s: float) -> float:
        """Of the requests sent since then that were answered, and have to be a few: infinite before."""
        ttft_s = sorted(sent.ttft_s for sent in self.answered if sent.at_s >= since_s)
        return ttft_s[int(0.9 * len(ttft_s))] if len(ttft_s) >= 20 else float("inf")

    async def _send(self) -> None:
        next_s = time.monotonic()
        while True:
            next_s = max(next_s + self._dice.uniform(0.8, 1.2) / self.rate, time.monotonic() - 1.0)
            await asyncio.sleep(next_s - time.monotonic())
            task = asyncio.create_task(self._ask())
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _ask(self) -> None:
        text = self._dice.randbytes(PROMPT_TOKENS // 2).hex()
        sent_s = time.monotonic()
        try:
            answer = await self._client.generate(pb.GenerateRequest(text=text), timeout_s=60)
        except Exception as error:
            self.failures.append(error)
        else:
            self.answered.append(Sent(sent_s, answer.ttft_s))
