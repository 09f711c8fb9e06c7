"""Requests that find all workers asleep: how long they wait, and what they hear."""

import asyncio

import pytest

from baton_proto.waking import Outcome
from baton_proto.worker import Delta, Failure, Submit
from router.text.tokenizer import Tokenizer
from runtime.errors import AsleepError, UnavailableError
from tests.router.scripted_worker import ScriptedWorker, answer, steps_of
from tests.router.small_router import Router, collect, fails_with, request, routing, stream


class Supervisor:
    """Answers each question as it is told to, and counts them."""

    def __init__(self, router: Router, timeout_s: float = 60.0) -> None:
        self.asked = 0
        self.answer = asyncio.get_running_loop().create_future()
        router.waking.ask, router.waking.timeout_s = self._ask, timeout_s

    async def _ask(self, timeout_s: float) -> Outcome:
        self.asked += 1
        outcome: Outcome = await asyncio.shield(self.answer)
        return outcome


async def waiting(router: Router, count: int) -> "list[asyncio.Task[object]]":
    tasks: list[asyncio.Task[object]] = [asyncio.create_task(collect(stream(router, request()))) for _ in range(count)]
    while router.queue.view().waiting < count:
        await asyncio.sleep(0)
    return tasks


async def test_requests_ask_once_and_go_on_when_the_worker_is_awake(tokenizer: Tokenizer) -> None:
    decode = ScriptedWorker("d0")
    async with routing(tokenizer, decode) as router:
        supervisor = Supervisor(router)
        router.pool.apply(decode.changed("sleeping"))
        tasks = await waiting(router, 3)
        while not supervisor.asked:
            await asyncio.sleep(0)
        supervisor.answer.set_result(Outcome("awake"))
        router.pool.apply(decode.changed("ready"))
        await asyncio.gather(*tasks)
        assert supervisor.asked == 1
        router.check_idle()


async def test_a_worker_that_sleeps_on_fails_all_who_wait_and_who_comes_just_then(tokenizer: Tokenizer) -> None:
    decode = ScriptedWorker("d0")
    async with routing(tokenizer, decode) as router:
        supervisor = Supervisor(router)
        router.pool.apply(decode.changed("sleeping"))
        tasks = await waiting(router, 2)
        supervisor.answer.set_result(Outcome("failed", "its files are gone"))
        for task in tasks:
            with fails_with(AsleepError, "the model sleeps on: its files are gone; try again in 60.0 s"):
                await task
        with fails_with(AsleepError, "its files are gone"):
            await collect(stream(router, request()))
        assert supervisor.asked == 1
        router.check_idle()


async def test_who_has_waited_long_enough_hears_why_and_when_to_come_back(tokenizer: Tokenizer) -> None:
    decode = ScriptedWorker("d0")
    async with routing(tokenizer, decode) as router:
        supervisor = Supervisor(router, timeout_s=0.3)
        router.pool.apply(decode.changed("sleeping"))
        supervisor.answer.set_result(Outcome("busy", "another one answers"))
        with pytest.raises(AsleepError) as late:
            await collect(stream(router, request()))
        assert str(late.value) == (
            "the model sleeps, and did not wake within 0.3 s (another one answers); try again in 1.0 s"
        )


async def test_where_nobody_wakes_workers_a_request_waits_as_for_one_that_is_missing(tokenizer: Tokenizer) -> None:
    decode = ScriptedWorker("d0")
    async with routing(tokenizer, decode) as router:
        router.pool.apply(decode.changed("sleeping"))
        with fails_with(UnavailableError, "no decode worker that can serve was ready for 0.3 s; asleep: d0"):
            await collect(stream(router, request()))


async def test_who_was_refused_by_a_worker_that_fell_asleep_goes_there_when_it_is_awake(tokenizer: Tokenizer) -> None:
    """Also where it is another request that had the worker woken."""

    async def refuses(worker: ScriptedWorker, submit: Submit) -> None:
        failure = Failure("refused", "the decode worker is draining", retryable=True, worker_id="d0")
        worker.send(Delta(submit.request_id, failure=failure))

    decode = ScriptedWorker("d0", script=steps_of(refuses, answer))
    async with routing(tokenizer, decode) as router:
        asked = asyncio.create_task(collect(stream(router, request())))
        while not (decode.submits and router.queue.view().waiting):
            await asyncio.sleep(0)
        for state in ("draining", "sleeping", "ready"):
            router.pool.apply(decode.changed(state))
        await asked
        assert len(decode.submits) == 2
        router.check_idle()
