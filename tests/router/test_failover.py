"""Replays are exact, retries bounded, and whoever waits for workers is told in time."""

import asyncio
import random
import time
from typing import Any

import pytest
from msgspec.structs import replace

from baton_proto.discovery import WorkerLoad
from baton_proto.worker import Delta, Failure, Submit
from router.placement.weights import Weights
from router.requests import choice
from router.text.tokenizer import Tokenizer
from runtime.discovery.directory import Change
from runtime.errors import (
    BatonError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    ProtocolError,
    UnavailableError,
)
from tests.clock import Clock
from tests.router.scripted_worker import (
    ScriptedWorker,
    answer,
    answer_until,
    greedy,
    steps_of,
    tokens_of,
)
from tests.router.small_router import (
    CONFIG,
    PROMPT,
    collect,
    fails_with,
    request,
    routing,
    silent,
    stream,
    text_of,
    then_fail,
    then_hang,
    watching,
)


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 9])
async def test_the_answer_is_exact_when_its_decode_worker_dies(tokenizer: Tokenizer, num_tokens: int) -> None:
    workers = [ScriptedWorker(f"d{i}", script=steps_of(then_hang(num_tokens), answer)) for i in range(2)]
    async with routing(tokenizer, *workers) as router:
        seen: list[int] = []
        answering = asyncio.create_task(collect(watching(stream(router, request(10)), seen)))
        while not (workers[0].submits or workers[1].submits):
            await asyncio.sleep(0.001)
        victim, survivor = workers if workers[0].submits else reversed(workers)
        survivor.script = answer
        while len(seen) < num_tokens:
            await asyncio.sleep(0.001)
        await victim.die()
        result = await answering
        assert result.tokens == {0: greedy(PROMPT, 10)}
        assert result.texts == {0: text_of(tokenizer, greedy(PROMPT, 10))}
        (served,) = result.finished.served_by
        assert (served.decode_worker, served.attempts) == (survivor.worker_id, 2)
        (replay,) = survivor.submits
        assert tokens_of(replay) == PROMPT + greedy(PROMPT, num_tokens)
        assert (replay.num_prompt_tokens, replay.sampling.max_tokens) == (len(PROMPT), 10)
        router.check_idle()


async def test_a_request_outlives_the_restart_of_the_only_worker(tokenizer: Tokenizer) -> None:
    decode = ScriptedWorker("d0", script=steps_of(then_hang(4), answer))
    async with routing(tokenizer, decode, config=replace(CONFIG, no_worker_timeout_s=60.0)) as router:
        seen: list[int] = []
        answering = asyncio.create_task(collect(watching(stream(router, request(10)), seen)))
        while len(seen) < 4:
            await asyncio.sleep(0.001)
        await decode.die()
        router.pool.apply(Change("removed", decode.record()))
        decode.address, decode.incarnation = "127.0.0.1:0", 2
        decode.hello = replace(decode.hello, incarnation=2)
        await decode.start()
        await router.add(decode)
        assert (await answering).tokens == {0: greedy(PROMPT, 10)}
        router.check_idle()


async def test_a_lost_prefill_worker_is_replaced_by_another(tokenizer: Tokenizer) -> None:
    lost: list[str] = []

    async def lose_the_first(worker: ScriptedWorker, submit: Submit) -> None:
        assert submit.prefill is not None
        if lost:
            await answer(worker, submit)
            return
        lost.append(submit.prefill.worker_id)
        failure = Failure("prefill_lost", "gone", retryable=True, worker_id=submit.prefill.worker_id)
        worker.send(Delta(submit.request_id, failure=failure))

    prefill = [ScriptedWorker(f"p{i}", "prefill") for i in range(2)]
    decode = ScriptedWorker("d0", script=lose_the_first)
    async with routing(tokenizer, decode, *prefill) as router:
        result = await collect(stream(router, request(10)))
        assert result.tokens == {0: greedy(PROMPT, 10)}
        (served,) = result.finished.served_by
        assert {served.prefill_worker, *lost} == {"p0", "p1"}
        assert (served.decode_worker, served.attempts) == ("d0", 2)
        router.check_idle()


async def test_the_decode_worker_runs_the_prompt_when_the_only_prefill_worker_is_lost(tokenizer: Tokenizer) -> None:
    async def lose(worker: ScriptedWorker, submit: Submit) -> None:
        if submit.prefill is None:
            await answer(worker, submit)
        else:
            failure = Failure("prefill_lost", "gone", retryable=True, worker_id=submit.prefill.worker_id)
            worker.send(Delta(submit.request_id, failure=failure))

    prefill, decode = ScriptedWorker("p0", "prefill"), ScriptedWorker("d0", script=lose)
    async with routing(tokenizer, decode, prefill) as router:
        result = await collect(stream(router, request(10)))
        assert result.tokens == {0: greedy(PROMPT, 10)}
        (served,) = result.finished.served_by
        assert (served.prefill_worker, served.attempts) == ("", 2)
        router.check_idle()


async def test_a_refusing_decode_worker_is_not_asked_again(tokenizer: Tokenizer) -> None:
    refusal = Failure("refused", "draining", retryable=True, worker_id="d0")
    refusing = ScriptedWorker("d0", script=then_fail(0, refusal))
    async with routing(tokenizer, refusing, ScriptedWorker("d1")) as router:
        for _ in range(10):
            assert (await collect(stream(router, request(3)))).tokens == {0: greedy(PROMPT, 3)}
        assert len(refusing.submits) <= 10
        assert len({submit.request_id.partition("/")[0] for submit in refusing.submits}) == len(refusing.submits)
        router.check_idle()


UNSUPPORTED = Failure("unsupported", "prompt_logprobs: not with this engine", retryable=True, worker_id="d0")


async def test_what_one_kind_of_engine_cannot_serve_goes_to_another_however_often(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempts are not spent on it, because no worker was lost."""
    monkeypatch.setattr(choice, "MAX_ATTEMPTS", 1)
    unable = [ScriptedWorker(f"d{i}", script=then_fail(0, replace(UNSUPPORTED, worker_id=f"d{i}"))) for i in range(6)]
    async with routing(tokenizer, *unable, ScriptedWorker("d6")) as router:
        for _ in range(5):
            assert (await collect(stream(router, request(3)))).tokens == {0: greedy(PROMPT, 3)}
        assert sum(len(worker.submits) for worker in unable) > 0
        assert "baton_router_failovers_total 0.0" in router.metrics.exposition().decode()
        router.check_idle()


@pytest.mark.parametrize(("num_tokens", "kind"), [(0, InvalidRequestError), (2, UnavailableError)])
async def test_what_no_engine_that_is_left_can_serve_ends_with_its_reason(
    tokenizer: Tokenizer, num_tokens: int, kind: type[BatonError]
) -> None:
    """A client whose answer has begun has asked for nothing wrong."""
    unable = ScriptedWorker("d0", script=then_fail(num_tokens, UNSUPPORTED))
    async with routing(tokenizer, unable) as router:
        with fails_with(kind, "worker d0 cannot serve it: prompt_logprobs: not with this engine"):
            await collect(stream(router, request(10)))
        assert len(unable.submits) == 1
        router.check_idle()


async def test_after_a_lost_worker_the_request_is_not_to_blame_for_what_the_rest_cannot_serve(
    tokenizer: Tokenizer,
) -> None:
    stumble = Failure("internal", "an engine step failed", retryable=True, worker_id="d0")
    decode = ScriptedWorker("d0", script=steps_of(then_fail(0, stumble), then_fail(0, UNSUPPORTED)))
    async with routing(tokenizer, decode) as router:
        with fails_with(UnavailableError, "worker d0 cannot serve it"):
            await collect(stream(router, request(10)))
        router.check_idle()


async def test_a_worker_whose_step_failed_is_tried_again_when_there_is_no_other(tokenizer: Tokenizer) -> None:
    stumble = Failure("internal", "an engine step failed", retryable=True, worker_id="d0")
    decode = ScriptedWorker("d0", script=steps_of(then_fail(3, stumble), then_fail(2, stumble), answer))
    async with routing(tokenizer, decode) as router:
        result = await collect(stream(router, request(10)))
        assert result.tokens == {0: greedy(PROMPT, 10)}
        assert result.finished.served_by[0].attempts == 3
        assert result.finished.tokens.cached_tokens == 16


async def test_attempts_are_bounded(tokenizer: Tokenizer) -> None:
    stumble = Failure("internal", "an engine step failed", retryable=True, worker_id="d0")
    decode = ScriptedWorker("d0", script=then_fail(1, stumble))
    async with routing(tokenizer, decode) as router:
        with fails_with(UnavailableError, "all 4 attempts .* an engine step failed"):
            await collect(stream(router, request(10)))
        assert len(decode.submits) == 4
        router.check_idle()


async def test_a_request_that_two_workers_died_with_gets_no_third(tokenizer: Tokenizer) -> None:
    dying: list[asyncio.Task[None]] = []

    async def die(worker: ScriptedWorker, submit: Submit) -> None:
        await answer_until(worker, submit, len(dying))
        dying.append(asyncio.create_task(worker.die()))

    workers = [ScriptedWorker(f"d{i}", script=die) for i in range(4)]
    async with routing(tokenizer, *workers) as router:
        with fails_with(UnavailableError, r"d\d and d\d died with this request, which gets no further worker"):
            await collect(stream(router, request(10)))
        assert sum(bool(worker.submits) for worker in workers) == 2
        router.check_idle()
    await asyncio.gather(*dying)


async def test_workers_that_die_far_apart_in_an_answer_are_not_laid_to_it(tokenizer: Tokenizer) -> None:
    dying: list[asyncio.Task[None]] = []

    async def die(worker: ScriptedWorker, submit: Submit) -> None:
        await answer_until(worker, submit, 20 if len(dying) < 3 else None)
        if len(dying) < 3:
            dying.append(asyncio.create_task(worker.die()))

    workers = [ScriptedWorker(f"d{i}", script=die) for i in range(4)]
    async with routing(tokenizer, *workers) as router:
        result = await collect(stream(router, request(80)))
        assert result.tokens == {0: greedy(PROMPT, 80)}
        assert result.finished.served_by[0].attempts == 4
        router.check_idle()
    await asyncio.gather(*dying)


@pytest.mark.parametrize(("code", "is_blamed"), [("prefill_lost", True), ("prefill_failed", False)])
async def test_a_prompt_that_two_prefill_workers_died_with_gets_no_third(
    code: str, is_blamed: bool, tokenizer: Tokenizer
) -> None:
    """Dead workers that never had the prompt, or had answered that they do not take it, are not laid to it."""

    async def lose(worker: ScriptedWorker, submit: Submit) -> None:
        if submit.prefill is None:
            await answer(worker, submit)
            return
        (victim,) = (one for one in prefill if one.worker_id == submit.prefill.worker_id)
        await victim.die()
        while not router.pool.has_died((victim.worker_id, victim.incarnation)):
            await asyncio.sleep(0.001)
        failure = Failure(code, "gone", retryable=True, worker_id=victim.worker_id)
        worker.send(Delta(submit.request_id, failure=failure))

    prefill = [ScriptedWorker(f"p{i}", "prefill") for i in range(3)]
    decode = ScriptedWorker("d0", script=lose)
    async with routing(tokenizer, decode, *prefill) as router:
        if is_blamed:
            with fails_with(UnavailableError, r"p\d and p\d died with this request"):
                await collect(stream(router, request(10)))
        else:
            assert (await collect(stream(router, request(10)))).tokens == {0: greedy(PROMPT, 10)}
        assert len({submit.prefill.worker_id for submit in decode.submits if submit.prefill}) == 3 - is_blamed
        router.check_idle()


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (Failure("internal", "broken", retryable=False, worker_id="d0"), ProtocolError),
        (Failure("refused", "too long", retryable=False, worker_id="d0"), InvalidRequestError),
        (Failure("deadline", "late", retryable=False, worker_id="d0"), DeadlineError),
    ],
    ids=lambda value: value.code if isinstance(value, Failure) else "",
)
async def test_a_final_failure_is_not_retried(tokenizer: Tokenizer, failure: Failure, kind: type[BatonError]) -> None:
    decode = ScriptedWorker("d0", script=then_fail(2, failure))
    async with routing(tokenizer, decode) as router:
        with fails_with(kind, "broken|too long|did not finish"):
            await collect(stream(router, request(10)))
        assert len(decode.submits) == 1
        router.check_idle()


async def test_without_a_worker_the_caller_is_told_after_a_while(tokenizer: Tokenizer) -> None:
    async with routing(tokenizer) as router:
        began_s = time.monotonic()
        with fails_with(UnavailableError, "no decode worker"):
            await collect(stream(router, request()))
        assert time.monotonic() - began_s > 0.25
        assert router.generator.not_ready() is not None
        router.check_idle()


async def test_a_worker_that_appears_in_time_serves_who_waits(tokenizer: Tokenizer) -> None:
    patient = replace(CONFIG, no_worker_timeout_s=60.0)
    async with routing(tokenizer, config=patient) as router, ScriptedWorker("d0") as decode:
        answering = asyncio.create_task(collect(stream(router, request(4))))
        await asyncio.sleep(0)
        await router.add(decode)
        assert (await answering).tokens == {0: greedy(PROMPT, 4)}
        assert router.generator.not_ready() is None


async def test_draining_and_misfit_workers_get_nothing(tokenizer: Tokenizer) -> None:
    async with routing(tokenizer) as router, ScriptedWorker("d0") as draining, ScriptedWorker("d1") as misfit:
        router.pool.apply(draining.added("draining"))
        router.pool.apply(Change("added", replace(misfit.record(), block_size=64)))
        await router.until(lambda: all(worker.link.connected for worker in router.pool.workers.values()))
        with fails_with(UnavailableError, "no decode worker"):
            await collect(stream(router, request()))
        router.pool.apply(Change("changed", draining.record()))
        assert (await collect(stream(router, request(2)))).tokens == {0: greedy(PROMPT, 2)}
        assert not misfit.submits


async def test_requests_wait_in_the_queue_for_room_on_the_decode_worker(tokenizer: Tokenizer, clock: Clock) -> None:
    proceed = asyncio.Event()

    async def when_told(worker: ScriptedWorker, submit: Submit) -> None:
        await proceed.wait()
        await answer(worker, submit)

    decode = ScriptedWorker("d0", script=when_told)
    async with routing(tokenizer, decode, config=replace(CONFIG, max_running_per_worker=2)) as router:
        tasks = [asyncio.create_task(collect(stream(router, request(3, priority=i)))) for i in range(6)]
        await decode.until(lambda: len(decode.submits) == 2)
        assert router.queue.view()[:2] == (4, 2)
        proceed.set()
        results = await asyncio.gather(*tasks)
        assert [result.tokens for result in results] == [{0: greedy(PROMPT, 3)}] * 6
        assert [submit.priority for submit in decode.submits] == [0, 1, 5, 4, 3, 2]
        router.check_idle()


async def test_long_prompts_wait_while_the_prefill_worker_has_its_fill(tokenizer: Tokenizer) -> None:
    prefill, decode = ScriptedWorker("p0", "prefill"), ScriptedWorker("d0")
    async with routing(tokenizer, prefill, decode) as router:
        prefill.report(WorkerLoad(queued_prefill_tokens=Weights().prefill_queue_tokens))
        key = ("p0", 1)
        while router.ledger.view(key).queued_prefill_tokens == 0:
            await asyncio.sleep(0.001)
        waiting = asyncio.create_task(collect(stream(router, request(3))))
        await asyncio.sleep(0.4)  # longer than one waits for a worker to appear: it is there, only busy
        assert router.queue.view()[:2] == (1, 0)
        prefill.report(WorkerLoad())
        assert (await waiting).tokens == {0: greedy(PROMPT, 3)}
        router.check_idle()


async def test_a_full_queue_refuses(tokenizer: Tokenizer) -> None:
    decode = ScriptedWorker("d0", script=silent)
    async with routing(tokenizer, decode, config=replace(CONFIG, queue_limit=1)) as router:
        holding = asyncio.create_task(collect(stream(router, request())))
        await decode.until(lambda: len(decode.submits) == 1)
        with fails_with(OverloadedError, "limit of 1"):
            await collect(stream(router, request()))
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        router.check_idle()


async def test_a_prompt_that_fits_no_worker_is_the_callers_mistake(tokenizer: Tokenizer) -> None:
    decode = ScriptedWorker("d0")
    decode.max_model_len = 64
    async with routing(tokenizer, decode) as router:
        assert router.generator.limits().pool_tokens == 64
        with fails_with(InvalidRequestError, "prompt: 40 prompt tokens and 30 of output .* 64 tokens"):
            await collect(stream(router, request(30)))
        assert not decode.submits
        router.check_idle()


async def test_many_requests_with_workers_dying_under_them(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four decode workers stumble at random; every answer is exact and nothing is left behind."""
    rng = random.Random(7)

    async def stumbling(worker: ScriptedWorker, submit: Submit) -> None:
        if rng.random() < 0.3:
            await answer_until(worker, submit, rng.randrange(6))
            failure = Failure("internal", "stumbled", retryable=True, worker_id=worker.worker_id)
            worker.send(Delta(submit.request_id, failure=failure))
        else:
            await answer(worker, submit)

    workers: list[Any] = [ScriptedWorker(f"d{i}", script=stumbling) for i in range(4)]
    monkeypatch.setattr(choice, "MAX_ATTEMPTS", 50)
    config = replace(CONFIG, max_running_per_worker=8)
    async with routing(tokenizer, *workers, config=config) as router:
        lengths = [rng.randrange(1, 12) for _ in range(100)]
        results = await asyncio.gather(*(collect(stream(router, request(length))) for length in lengths))
        assert [result.tokens[0] for result in results] == [greedy(PROMPT, length) for length in lengths]
        router.check_idle()
