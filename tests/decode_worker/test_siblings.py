"""Prompts with the same new beginning, on real workers: it is computed once and shipped once."""

import asyncio
from pathlib import Path

import pytest

from baton_proto.worker import PrefillTarget
from runtime.config.serving import ServingConfig
from tests.decode_worker.test_decode_worker import LONG
from tests.worker.router_client import Answer, RouterClient
from tests.worker.worker_process import WorkerProcess, prompt, start_worker

pytestmark = pytest.mark.asyncio(loop_scope="session")

BLOCK = 16
SHARED, OWN = 40 * BLOCK, 10  # tokens; ten steps


def siblings(count: int, seed: int, shared: int = SHARED) -> list[list[int]]:
    return [prompt(shared, seed) + prompt(OWN, 1000 * seed + number) for number in range(count)]


def computed(answers: list[Answer], prompts: list[list[int]]) -> int:
    """Prompt tokens, on prefill workers."""
    return sum(
        len(tokens) - answer.handoff.prompt_counts.cached_tokens
        for answer, tokens in zip(answers, prompts, strict=True)
        if answer.handoff is not None
    )


def shipped(answers: list[Answer]) -> int:
    """Blocks."""
    return sum(answer.handoff.kv_blocks for answer in answers if answer.handoff is not None)


async def local_answers(router: RouterClient, prompts: list[list[int]]) -> list[list[int]]:
    return [(await (await router.submit(tokens)).end()).token_ids for tokens in prompts]


async def test_32_siblings_have_their_prefix_computed_and_shipped_once(
    decode: WorkerProcess, prefill_shm: WorkerProcess
) -> None:
    prompts = siblings(32, seed=400)
    async with RouterClient(decode) as router:
        answers = [await router.submit(tokens, prefill=prefill_shm.target) for tokens in prompts]
        answers = [await answer.end() for answer in answers]
        assert computed(answers, prompts) == SHARED + 32 * OWN
        assert shipped(answers) == SHARED // BLOCK + 32
        assert [answer.token_ids for answer in answers] == await local_answers(router, prompts)
    await asyncio.gather(decode.until_idle(), prefill_shm.until_idle())


async def test_siblings_that_run_where_they_decode_have_their_prefix_computed_once(decode: WorkerProcess) -> None:
    prompts = siblings(16, seed=410)
    async with RouterClient(decode) as router:
        answers = [await router.submit(tokens) for tokens in prompts]
        cached = [(await answer.end()).cached_tokens for answer in answers]
        assert sorted(cached, key=lambda tokens: tokens or 0) == [0] + 15 * [SHARED]
        assert [answer.token_ids for answer in answers] == await local_answers(router, prompts)
    await decode.until_idle()


async def test_when_the_first_is_cancelled_in_mid_prompt_its_siblings_go_on_without_it(
    decode: WorkerProcess, prefill_shm: WorkerProcess
) -> None:
    prompts = siblings(6, seed=420, shared=LONG - LONG % BLOCK)
    async with RouterClient(decode) as router:
        first, *others = [await router.submit(tokens, prefill=prefill_shm.target) for tokens in prompts]
        await prefill_shm.until("in mid-prompt", lambda report: 0 < report.load.queued_prefill_tokens < LONG - 200)
        await router.cancel(first)
        assert (await first.end()).finish == "cancelled"
        others = [await answer.end() for answer in others]
        assert shipped(others) == LONG // BLOCK + 5, "one of them became the first"
        assert computed(others, prompts[1:]) < LONG + 6 * OWN, "what was computed already is still there"
        assert [answer.token_ids for answer in others] == await local_answers(router, prompts[1:])
    await asyncio.gather(decode.until_idle(), prefill_shm.until_idle())


async def test_when_the_prefill_worker_dies_all_siblings_are_told(
    decode: WorkerProcess, config: ServingConfig, folder: Path, mortal: list[WorkerProcess]
) -> None:
    victim = await start_worker("prefill", "prefill-of-siblings", config, folder)
    mortal.append(victim)
    prompts = siblings(4, seed=430, shared=LONG)
    async with RouterClient(decode) as router:
        answers = [await router.submit(tokens, prefill=victim.target) for tokens in prompts]
        await victim.until("in mid-prompt", lambda report: 0 < report.load.queued_prefill_tokens < LONG - 200)
        victim.kill()
        failures = [(await answer.end()).failure for answer in answers]
        codes = [failure.code for failure in failures if failure is not None]
        assert codes[0] == "prefill_lost"
        assert len(codes) == 4
        assert set(codes) <= {"prefill_lost", "prefill_failed"}, "who asked after its death is told the second"
        await decode.until_idle(5)


async def test_siblings_do_not_wait_one_after_the_other_for_a_prefill_worker_that_does_not_answer(
    decode: WorkerProcess,
) -> None:
    callers = []
    silent = await asyncio.start_server(lambda *streams: callers.append(streams), "127.0.0.1", 0)
    address = "{}:{}".format(*silent.sockets[0].getsockname())
    async with silent, RouterClient(decode) as router:
        target = PrefillTarget("prefill-silent", 1, address)
        answers = [await router.submit(tokens, prefill=target) for tokens in siblings(5, seed=450)]
        failures = [(await answer.end()).failure for answer in answers]
        assert [failure.code for failure in failures if failure is not None] == 5 * ["prefill_failed"]
        assert len(callers) == 1
        for _, writer in callers:
            writer.close()
    await decode.until_idle(1)


async def test_siblings_of_different_prefill_workers_do_not_wait_for_each_other(
    decode: WorkerProcess, prefill_shm: WorkerProcess
) -> None:
    prompts = siblings(2, seed=440, shared=LONG - LONG % BLOCK)
    callers = []
    silent = await asyncio.start_server(lambda *streams: callers.append(streams), "127.0.0.1", 0)
    address = "{}:{}".format(*silent.sockets[0].getsockname())
    async with silent, RouterClient(decode) as router:
        first = await router.submit(prompts[0], prefill=PrefillTarget("prefill-silent", 1, address))
        second = await router.submit(prompts[1], prefill=prefill_shm.target)
        answer = await second.end()
        assert not first.ended, "nobody computes it"
        await router.cancel(first)
        assert (await first.end()).finish == "cancelled"
        assert [answer.token_ids] == await local_answers(router, prompts[1:])
        for _, writer in callers:
            writer.close()
    await asyncio.gather(decode.until_idle(), prefill_shm.until_idle())
