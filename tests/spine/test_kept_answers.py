"""A prefill worker that keeps answers beside those of a full decode worker: they are exact, whatever becomes of it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from baton_proto.generated import inference_pb2 as pb
from runtime.calls.answer import Answer
from tests.service import Service, SharedService
from tests.spine.oracle import Oracle
from tests.spine.prompts import greedy, random_prompt
from tests.spine.worker_view import inspect, until_idle, until_tree_is_right, until_used

pytestmark = pytest.mark.asyncio(loop_scope="module")

EACH = 2  # answers of a worker, of twice as many requests
LENGTH = 1200  # so that the first still runs when the last has begun


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(tiny_model: Path) -> AsyncIterator[SharedService]:
    router = {"max_running_per_worker": EACH}
    async with SharedService(tiny_model, 1, 1, router=router, workers={"drain_timeout_s": 60.0}) as shared:
        yield shared


class Load:
    """Requests that fill the decode worker, so that the prefill worker keeps as many answers."""

    def __init__(self, service: Service, first_seed: int) -> None:
        self._service = service
        self._prompts = [random_prompt(60 + seed, seed=seed) for seed in range(first_seed, first_seed + 2 * EACH)]
        self._begun = [asyncio.Event() for _ in self._prompts]
        self._answers = [asyncio.create_task(self._ask(number)) for number in range(2 * EACH)]

    async def _ask(self, number: int) -> Answer:
        request = greedy(self._prompts[number], LENGTH, ignore_eos=True)
        request.request_id = f"answer-{number}"
        return await self._service.client.generate(request, 60, lambda piece: self._begun[number].set())

    async def until_all_run(self, keeper: str) -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(*(begun.wait() for begun in self._begun))
        load = (await inspect(self._service, keeper)).load
        assert (load.running, load.prompts) == (EACH, 0)

    async def ended(self, oracle: Oracle) -> list[pb.ServedBy]:
        """Who served the requests; all answers are right."""
        answers = await asyncio.gather(*self._answers)
        for prompt, answer in zip(self._prompts, answers, strict=True):
            assert answer.token_ids == oracle.greedy(prompt, LENGTH, ignore_eos=True, guess=answer.token_ids)
        await until_idle(self._service)
        await until_tree_is_right(self._service)
        return [answer.served_by[0] for answer in answers]


async def test_kept_answers_are_exact_and_told_as_such(shared: SharedService, oracle: Oracle) -> None:
    async with shared.using() as service:
        load = Load(service, 0)
        await load.until_all_run("prefill-1")
        served = await load.ended(oracle)
        assert sorted(one.decode_worker for one in served) == ["decode-1"] * EACH + ["prefill-1"] * EACH
        assert {(one.prefill_worker, one.attempts) for one in served if one.decode_worker == "prefill-1"} == {("", 1)}
        number = [one.decode_worker for one in served].index("prefill-1")
        explained = await service.client.explain(pb.ExplainRequest(request_id=f"answer-{number}"))
        assert [one.reason for one in explained.decisions] == [pb.PLACEMENT_REASON_KEPT]
        status = {worker.worker_id: worker for worker in (await service.client.status(60)).workers}
        assert [status[name].output_tokens for name in ("prefill-1", "decode-1")] == [EACH * LENGTH] * 2


async def test_a_prefill_worker_sleeps_and_ends_when_the_answers_that_it_keeps_have_ended(
    shared: SharedService, oracle: Oracle
) -> None:
    async with shared.using() as service:
        load = Load(service, 10)
        await load.until_all_run("prefill-1")
        slept = await service.client.sleep("prefill-1", 1)
        assert slept.state == "sleeping"
        assert {one.attempts for one in await load.ended(oracle)} == {1}
        await service.client.wake("prefill-1")
        await until_used(service)
        load = Load(service, 20)
        await load.until_all_run("prefill-1")
        assert await service.stop_worker("prefill-1")
        assert {one.attempts for one in await load.ended(oracle)} == {1}
        assert await service.start_worker("prefill") == "prefill-2"
        await until_used(service)


async def test_a_prefill_worker_that_is_killed_loses_no_token_of_the_answers_that_it_keeps(
    shared: SharedService, oracle: Oracle
) -> None:
    async with shared.using() as service:
        (keeper,) = service.workers("prefill")
        load = Load(service, 30)
        await load.until_all_run(keeper)
        service.kill(keeper)
        served = await load.ended(oracle)
        assert sorted(one.attempts for one in served) == [1] * EACH + [2] * EACH
        assert {one.decode_worker for one in served} == {"decode-1"}
