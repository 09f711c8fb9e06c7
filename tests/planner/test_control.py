"""What a planner answers its operators, and what it keeps of that, over a real NATS server. Its workers are made up."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from baton.service.local.nats_server import NatsServer
from baton_proto.orders import prove
from baton_proto.planner import Holds, Observation
from baton_proto.planner_control import MAJOR, Order, Question, Release, Scale, encode
from planner.acting.hand import Hand
from planner.acting.memory_store import MemoryStore
from planner.control import Control
from planner.journal import Line, Ordered
from planner.loop import PlannerLoop
from planner.planner import Planner
from runtime.calls.planner import ask_plan, tell_planner
from runtime.errors import DeadlineError, InvalidRequestError, UnavailableError
from runtime.nats.client import NatsClient, connect
from runtime.nats.subjects import planner_subject
from runtime.security.callers import key_name
from runtime.security.secret import Secret
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
    lines: list[Line]  # of the journal


@asynccontextmanager
async def desk_at(
    server: NatsServer, prefill: int = 2, decode: int = 2, operators: Sequence[Secret] = ()
) -> AsyncIterator[Desk]:
    nats = await connect(server.url, "planner")
    processes, hand = Processes(), Hand(MemoryStore(nats))
    await hand.load()
    processes.workers = {view.worker_id: view for view in workers(prefill, decode)}

    async def observe() -> Observation:
        return observation(0.0, list(processes.workers.values()), holds=hand.holds())

    loop = PlannerLoop(CONFIG, Planner(CONFIG), observe, processes)
    lines: list[Line] = []
    control = Control(loop, hand, "127.0.0.1:9", operators, lines.append)
    await nats.answer(planner_subject(nats.namespace), control.answer)
    try:
        yield Desk(nats, loop, hand, processes, lines)
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


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (Scale(prefill=0), r"prefill: 0 workers cannot be: planner\.limits allow 1 to 64 \(prefill\)"),
        (Scale(decode=65), r"decode: 65 workers cannot be: planner\.limits allow 1 to 64 \(decode\)"),
        (
            Scale(decode=60),
            r"planner\.limits\.gpu_budget: 32 GPUs are the budget, and this takes 1 for prefill and 60 for decode",
        ),
    ],
)
async def test_counts_that_the_limits_or_the_budget_forbid_are_refused_and_change_nothing(
    nats_server: NatsServer, wanted: Scale, words: str
) -> None:
    async with desk_at(nats_server) as desk:
        await tell_planner(desk.nats, Scale(decode=2), TIMEOUT_S)
        await desk.loop.step()
        with pytest.raises(InvalidRequestError, match=words):
            await tell_planner(desk.nats, wanted, TIMEOUT_S)
        assert desk.hand.holds() == Holds(None, 2)


async def test_an_order_needs_an_operator_key_and_its_proof_is_taken_once(nats_server: NatsServer) -> None:
    keys = (Secret("a" * 32), Secret("b" * 32))
    async with desk_at(nats_server, operators=keys) as desk:
        for wrong in (None, Secret("c" * 32)):
            with pytest.raises(InvalidRequestError, match=r"planner: .* --operator-key-file or BATON_OPERATOR_KEY"):
                await tell_planner(desk.nats, Scale(decode=2), TIMEOUT_S, wrong)
        assert desk.hand.holds() == Holds()
        for number, key in enumerate(keys, 1):
            await tell_planner(desk.nats, Scale(decode=number), TIMEOUT_S, key)
            assert desk.hand.holds() == Holds(None, number)
        plan = await ask_plan(desk.nats, TIMEOUT_S)
        order = Scale(decode=3)
        question = encode(Question(MAJOR, order, prove(keys[0].reveal(), plan.challenge, order)))
        answers = [await desk.nats.request(planner_subject(desk.nats.namespace), question, TIMEOUT_S) for _ in range(2)]
        assert [b'"done"' in answer for answer in answers] == [True, False]
        for other in (Scale(decode=4), Scale(prefill=3), Release()):
            plan = await ask_plan(desk.nats, TIMEOUT_S)
            stolen = encode(Question(MAJOR, other, prove(keys[0].reveal(), plan.challenge, order)))
            answer = await desk.nats.request(planner_subject(desk.nats.namespace), stolen, TIMEOUT_S)
            assert b'"refused"' in answer
        assert desk.hand.holds() == Holds(None, 3)
        orders = [(line.order, line.by) for line in desk.lines if isinstance(line, Ordered)]
        assert orders == [(Scale(decode=n), key_name(keys[n % 2 - 1])) for n in (1, 2, 3)], "the journal has who"


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
