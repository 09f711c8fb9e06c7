"""`vllm serve --data-parallel-size 2` as two workers: each with the cache, the events and the load of its rank."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton_proto.generated import inference_pb2 as pb
from baton_proto.worker import InspectReport
from runtime.calls.worker import WorkerClient
from runtime.checkpoint.model_files import resolve_model
from tests.service import Service, running_service
from tests.spine.oracle import Oracle
from tests.vllm.environment import LIMIT_S, PATIENCE_S
from tests.vllm.server import BLOCK, VllmServer, prompt
from tests.vllm.test_external_workers import external, incarnation, until_status
from tests.vllm.test_workers import ask, text

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(LIMIT_S)]

RANKS = ("gpu-dp0", "gpu-dp1")
BLOCKS = 64  # of a rank


async def test_each_rank_is_a_worker(vllm_python: Path, tmp_path: Path) -> None:
    """All of it in one test, because the server takes a minute to start."""
    oracle = Oracle(resolve_model("smollm2").folder)
    server = VllmServer(vllm_python, tmp_path / "server.log", 512, BLOCKS, ranks=2)
    sections: dict[str, Any] = {
        "external_workers": [external(server, "gpu")],
        "engine": {"block_size": BLOCK, "cache_salt": "a test's own"},
    }
    try:
        await server.start()
        await asyncio.gather(*(server.complete(prompt(1), rank=rank) for rank in range(2)))
        async with running_service("smollm2", 0, 0, **sections) as service:
            await until_status(service, {*RANKS})
            await answers_are_those_of_transformers(service, oracle)
            await a_second_question_goes_to_the_rank_that_has_the_first_ones_blocks(service)
            await requests_of_others_count_in_the_load_of_their_rank(service, server)
            await the_end_of_a_rank_is_the_end_of_all(service, server, oracle)
            assert "on_step failed" not in service.log("gpu")
    finally:
        await server.close()


async def answers_are_those_of_transformers(service: Service, oracle: Oracle) -> None:
    prompts = [text(number, length) for number, length in enumerate((1, 31, 32, 33, 64, 100))]
    answers = await asyncio.gather(*(ask(service, one, 12) for one in prompts))
    assert [answer.token_ids for answer in answers] == [oracle.greedy(one, 12) for one in prompts]
    assert {answer.served_by[0].decode_worker for answer in answers} == {*RANKS}
    await until_right(service)


async def a_second_question_goes_to_the_rank_that_has_the_first_ones_blocks(service: Service) -> None:
    chats = [text(100 + number, 10 * BLOCK) for number in range(4)]
    first = await asyncio.gather(*(ask(service, chat, 2) for chat in chats))
    await until_right(service)
    assert {answer.served_by[0].decode_worker for answer in first} == {*RANKS}
    for chat, before in zip(chats, first, strict=True):
        answer = await ask(service, [*chat, 504, 3575], 2)
        assert answer.served_by[0].decode_worker == before.served_by[0].decode_worker
        assert answer.usage.cached_tokens == 10 * BLOCK
    hops = (await service.client.explain(pb.ExplainRequest(request_id=answer.request_id), PATIENCE_S)).hops
    assert {hop.worker for hop in hops if hop.worker} <= {answer.served_by[0].decode_worker, "router"}
    compared = await service.client.diff(pb.DiffRequest(), 10)
    assert [(worker.missing, worker.extra, worker.changed) for worker in compared] == [(0, 0, 0)] * 2
    assert all(worker.worker_blocks >= 10 for worker in compared)


async def requests_of_others_count_in_the_load_of_their_rank(service: Service, server: VllmServer) -> None:
    theirs = asyncio.create_task(server.complete(prompt(3), 400, rank=1))
    async with asyncio.timeout(PATIENCE_S):
        while not any(report.load.running for report in await inspect_ranks(service)):
            await asyncio.sleep(0.01)
    loads = [report.load for report in await inspect_ranks(service)]
    assert [load.running for load in loads] == [0, 1]
    assert [load.blocks_total for load in loads] == [BLOCKS] * 2
    theirs.cancel()
    await asyncio.gather(theirs, return_exceptions=True)
    await until_right(service)


async def the_end_of_a_rank_is_the_end_of_all(service: Service, server: VllmServer, oracle: Oracle) -> None:
    before = {name: await incarnation(service, name) for name in RANKS}
    (core,) = (one for one in server.processes() if "EngineCore_DP1" in " ".join(one.cmdline()))
    core.kill()
    await until_status(service, set())
    await server.stop()
    await server.start()
    await until_status(service, {*RANKS})
    assert all([await incarnation(service, name) > before[name] for name in RANKS])
    again = text(300, 40)
    assert (await ask(service, again, 8)).token_ids == oracle.greedy(again, 8)


async def inspect_ranks(service: Service) -> list[InspectReport]:
    async def inspect(worker: pb.WorkerStatus) -> InspectReport:
        async with WorkerClient(worker.worker_id, worker.address, service.supervisor.keys.cluster) as client:
            return await client.inspect()

    return await asyncio.gather(*map(inspect, (await service.client.status(60)).workers))


async def until_right(service: Service) -> None:
    """Waits until both ranks are idle, and the router's tree has all that they published."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            reports, workers = await inspect_ranks(service), (await service.client.status(60)).workers
            is_idle = not any(report.load.running or report.load.blocks_used for report in reports)
            published = [report.load.last_event_id for report in reports]
            if (
                is_idle
                and published == [worker.last_event_id for worker in workers]
                and not any(one.note for one in workers)
            ):
                return
            await asyncio.sleep(0.05)
