"""Requests that would come too late, over scripted workers: refused at once, and nothing is held for them."""

import asyncio
import time
from contextlib import aclosing

import pytest
from msgspec.structs import replace

from baton_proto.worker import Failure, Submit
from router.placement.candidates import Work
from router.requests import choice
from router.requests.request import GenerateRequest
from router.text.tokenizer import Tokenizer
from runtime.errors import DeadlineError, TooLateError
from tests.clock import Clock
from tests.router.scripted_worker import ScriptedWorker, answer, answer_until, greedy
from tests.router.small_router import CONFIG, PROMPT, collect, fails_with, request, routing, silent, stream, then_fail


def due_in(seconds: float) -> GenerateRequest:
    return replace(request(), first_by_s=time.monotonic() + seconds)


async def test_a_request_that_no_worker_serves_in_time_is_refused_without_a_trace(tokenizer: Tokenizer) -> None:
    async with routing(tokenizer, ScriptedWorker("d0", script=silent)) as router:
        running = asyncio.create_task(collect(stream(router, request())))
        while not router.queue.view().running:
            await asyncio.sleep(0)
        before = router.queue.view()
        with fails_with(TooLateError, "the first token is expected in (.*) s, and is due in 0 s; try again in \\1 s"):
            await collect(stream(router, due_in(1e-6)))
        assert router.queue.view() == before
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        router.check_idle()


async def test_a_worker_with_nothing_to_do_runs_a_request_however_soon_it_is_due(tokenizer: Tokenizer) -> None:
    async with routing(tokenizer, ScriptedWorker("d0")) as router:
        assert (await collect(stream(router, due_in(1e-6)))).tokens == {0: greedy(PROMPT, 10)}


async def test_a_request_behind_others_is_refused_before_it_waits(tokenizer: Tokenizer) -> None:
    one_each = replace(CONFIG, max_running_per_worker=1)
    async with routing(tokenizer, ScriptedWorker("d0", script=silent), config=one_each) as router:
        running = asyncio.create_task(collect(stream(router, request())))
        while not router.queue.view().running:
            await asyncio.sleep(0)
        waiting = asyncio.create_task(collect(stream(router, request())))
        while not router.queue.view().waiting:
            await asyncio.sleep(0)
        with fails_with(TooLateError, "try again in"):
            await collect(stream(router, due_in(1e-6)))
        assert router.queue.view()[:2] == (1, 1)
        for task in (running, waiting):
            task.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)


async def test_the_prompts_before_a_request_count_with_the_attention_of_what_is_not_cached_of_them(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_each = replace(CONFIG, max_running_per_worker=1)
    seen: list[Work] = []
    monkeypatch.setattr(choice, "check_in_time", lambda weighing, before, due_ms: seen.append(before))
    async with routing(tokenizer, ScriptedWorker("d0", script=silent), config=one_each) as router:
        router.metrics.totals.prompt_tokens, router.metrics.totals.cached_tokens = 100, 25
        tasks = [asyncio.create_task(collect(stream(router, one))) for one in (request(), request(), due_in(9.0))]
        while not seen:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert seen == [Work(30, (40**2 - 10**2) / 2)]


async def test_what_has_begun_is_finished_however_late_it_is(tokenizer: Tokenizer, clock: Clock) -> None:
    async def late(worker: ScriptedWorker, submit: Submit) -> None:
        await answer_until(worker, submit, 3)
        clock.now_s += 0.3
        await then_fail(0, Failure("internal", "a fault", retryable=True, worker_id="d0"))(worker, submit)

    first = ScriptedWorker("d0", script=late)
    async with routing(tokenizer, first) as router, aclosing(stream(router, due_in(0.2))) as pieces:
        tokens: list[int] = []
        async for piece in pieces:
            tokens += getattr(piece, "token_ids", [])
            first.script = answer
        assert tokens == greedy(PROMPT, 10)


async def test_a_request_whose_whole_time_is_over_has_missed_its_deadline(tokenizer: Tokenizer) -> None:
    async with routing(tokenizer, ScriptedWorker("d0")) as router:
        over = replace(request(timeout_s=-0.1), first_by_s=time.monotonic() - 0.1)
        with fails_with(DeadlineError, "was late before it began"):
            await collect(stream(router, over))
        router.check_idle()
