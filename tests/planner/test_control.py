"""What a planner answers its operators, and what it keeps of that, over a real NATS server. Its workers are made up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from baton.service.nats_server import NatsServer
from baton_proto.planner import Holds, Observation
from baton_proto.planner_control import Order, Release, Scale
from planner.acting.hand import Hand
from planner.acting.memory_store import MemoryStore
from planner.control import Control
from planner.loop import PlannerLoop
from planner.planner import Planner
from runtime.calls.planner import ask_plan, tell_planner
from runtime.errors import DeadlineError, InvalidRequestError, UnavailableError
from runtime.nats.client import NatsClient, connect
from runtime.nats.subjects import planner_subject
from tests.planner.observations import observation, workers
from tests.planner.test_loop import CONFIG, Processes

TIMEOUT_S = 30.0


@dataclass
class Desk:
    """A planner that decides when it is told to."""

    nats: NatsClient
    loop: PlannerLoop
    hand: Hand
    processes: Processes


@asynccontextmanager
async def desk_at(server: NatsServer, prefill: int = 2, decode: int = 2) -> AsyncIterator[Desk]:
    nats = await connect(server.url, "planner")
    processes, hand = Processes(), Hand(MemoryStore(nats))
    await hand.load()
    processes.workers = {view.worker_id: view for view in workers(prefill, decode)}

    async def observe() -> Observation:
        return observation(0.0, list(processes.workers.values()), holds=hand.holds())

    loop = PlannerLoop(CONFIG, Planner(CONFIG), observe, processes)
    await nats.answer(planner_subject(nats.namespace), Control(loop, hand, "127.0.0.1:9").answer)
    try:
        yield Desk(nats, loop, hand, processes)
    finally:
        await loop.effects.close()
        await nats.close()


async def test_the_plan_is_the_last_decision_and_what_has_become_of_it(nats_server: NatsServer) -> None:
    async with desk_at(nats_server) as desk:
        before = await ask_plan(desk.nats, TIMEOUT_S)
        assert (before.observation, before.age_s, before.metrics_address) == (None, None, "127.0.0.1:9")
        await desk.loop.step()
        await tell_planner(desk.nats, Order("drain", "decode-0"), TIMEOUT_S)
        plan = await ask_plan(desk.nats, TIMEOUT_S)
        assert plan.observation is not None
        assert len(plan.observation.workers) == 4
        assert [(effect.verb, effect.worker_id) for effect in plan.effects] == [("drain", "decode-0")]


async def test_counts_set_by_hand_outlive_the_planner_and_go_when_they_are_released(nats_server: NatsServer) -> None:
    async with desk_at(nats_server) as desk:
        await tell_planner(desk.nats, Scale(prefill=3), TIMEOUT_S)
        assert "prefill 3, decode 1" in await tell_planner(desk.nats, Scale(decode=1), TIMEOUT_S)
    async with desk_at(nats_server) as heir:
        assert heir.hand.holds() == Holds(3, 1)
        await tell_planner(heir.nats, Release(), TIMEOUT_S)
        assert heir.hand.holds() == Holds()


async def test_a_flip_by_hand_sets_the_counts_that_come_of_it(nats_server: NatsServer) -> None:
    async with desk_at(nats_server) as desk:
        await desk.loop.step()
        said = await tell_planner(desk.nats, Order("flip", "prefill-0"), TIMEOUT_S)
        assert said == "prefill-0 drains and turns into a decode worker; set by hand: prefill 1, decode 3"
        target = await desk.loop.step()
        assert target is not None
        assert (target.prefill, target.decode) == (1, 3)


@pytest.mark.parametrize(
    ("worker_id", "words"),
    [
        ("nobody", "worker: 'nobody' is not known; the planner sees: prefill-0, prefill-1, decode-0"),
        ("decode-0", "decode-0 is the only decode worker that serves"),
        ("prefill-1", "prefill-1 cannot be changed now: drain"),
    ],
)
async def test_an_order_that_cannot_be_carried_out_is_refused_with_the_reason(
    nats_server: NatsServer, worker_id: str, words: str
) -> None:
    async with desk_at(nats_server, prefill=2, decode=1) as desk:
        with pytest.raises(InvalidRequestError, match="has not seen the service yet"):
            await tell_planner(desk.nats, Order("drain", worker_id), TIMEOUT_S)
        await desk.loop.step()
        await tell_planner(desk.nats, Order("drain", "prefill-1"), TIMEOUT_S)
        with pytest.raises(InvalidRequestError, match=words):
            await tell_planner(desk.nats, Order("drain", worker_id), TIMEOUT_S)


async def test_a_question_that_cannot_be_read_is_refused(nats_server: NatsServer) -> None:
    async with desk_at(nats_server) as desk:
        answer = await desk.nats.request(planner_subject(desk.nats.namespace), b"{}", TIMEOUT_S)
        assert b'"refused"' in answer


async def test_without_a_planner_and_with_one_that_is_stuck_the_caller_hears_so_in_time(
    nats_server: NatsServer,
) -> None:
    nats = await connect(nats_server.url, "test")
    try:
        with pytest.raises(UnavailableError, match="no planner runs in namespace 'default'"):
            await ask_plan(nats, TIMEOUT_S)

        async def stuck(question: bytes) -> bytes:
            await asyncio.Event().wait()
            return b""

        await nats.answer(planner_subject(nats.namespace), stuck)
        with pytest.raises(DeadlineError, match=r"the planner's answer did not finish within 0\.2 s"):
            await ask_plan(nats, 0.2)
    finally:
        await nats.close()


async def test_saving_while_nats_is_away_raises_nothing_and_works_again_without_its_storage(
    nats_server: NatsServer,
) -> None:
    nats = await connect(nats_server.url, "test")
    try:
        store = MemoryStore(nats)
        assert await store.load("memory") is None
        assert await store.save("memory", b"one")
        assert await store.load("memory") == b"one"
        await nats_server.stop()
        assert not await store.save("memory", b"two")
        await nats_server.restart(lose_storage=True)
        await nats.wait_connected()
        async with asyncio.timeout(TIMEOUT_S):
            while not await store.save("memory", b"three"):
                await nats.wait_connected()
        assert await store.load("memory") == b"three"
    finally:
        await nats.close()
