"""kill -9 in mid-request: with another worker alive the client gets the exact answer, with none a clear error."""

import asyncio
from pathlib import Path

import grpc
import pytest

from baton_proto.generated import inference_pb2 as pb
from runtime.calls.answer import Answer
from tests.service import TRANSPORTS, Service, running_service
from tests.spine.oracle import Oracle
from tests.spine.prompts import ask, greedy, random_prompt
from tests.spine.worker_view import kill_running, until_gone, until_idle

SHIP_ALL = {"router": {"placement": {"local_prefill_tokens": 0}, "no_worker_timeout_s": 2.0}}
SLOW_PROMPTS = {"max_batch_tokens": 16}  # a long prompt takes hundreds of steps


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)


async def killed_in_mid_prompt(service: Service, prompts: list[list[int]], max_tokens: int) -> tuple[str, list[Answer]]:
    """Kills a prefill worker that is busy with a prompt; returns its id and the answers."""
    requests = [asyncio.create_task(ask(service.client, prompt, max_tokens)) for prompt in prompts]
    lost = await kill_running(service, service.workers("prefill"))
    return lost, list(await asyncio.gather(*requests))


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_prefill_workers_killed_in_mid_prompt_cost_no_answer(
    tiny_model: Path, oracle: Oracle, transport: str
) -> None:
    """One of two, and then the other."""
    transfer = {"transport": transport}
    async with running_service(tiny_model, 2, 1, SHIP_ALL, engine=SLOW_PROMPTS, transfer=transfer) as service:
        lost = await another_one_is_left(service, oracle)
        await until_gone(service, lost)
        await none_is_left_so_the_decode_worker_runs_the_prompt(service, oracle)


async def another_one_is_left(service: Service, oracle: Oracle) -> str:
    """The id of the lost one."""
    prompts = [random_prompt(3000, seed=seed) for seed in range(3)]
    lost, answers = await killed_in_mid_prompt(service, prompts, 12)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == oracle.greedy(prompt, 12, guess=answer.token_ids)
    assert {answer.served_by[0].prefill_worker for answer in answers} == {"prefill-1", "prefill-2"} - {lost}
    assert any(answer.served_by[0].attempts > 1 for answer in answers)
    await until_idle(service)
    return lost


async def none_is_left_so_the_decode_worker_runs_the_prompt(service: Service, oracle: Oracle) -> None:
    prompt = random_prompt(3000, seed=7)
    _, (answer,) = await killed_in_mid_prompt(service, [prompt], 12)
    assert answer.token_ids == oracle.greedy(prompt, 12, guess=answer.token_ids)
    assert answer.served_by[0].prefill_worker == ""
    await until_idle(service)


async def test_decode_workers_killed_in_mid_stream_lose_and_double_no_token(tiny_model: Path, oracle: Oracle) -> None:
    """One of two, and then the other: the client gets a clear error in time."""
    async with running_service(tiny_model, 1, 2, SHIP_ALL) as service:
        lost = await a_decode_worker_is_left(service, oracle)
        await no_decode_worker_is_left(service, *({"decode-1", "decode-2"} - {lost}))


async def a_decode_worker_is_left(service: Service, oracle: Oracle) -> str:
    """The id of the lost one."""
    prompt, begun = random_prompt(100, seed=11), asyncio.Event()
    requests = [
        asyncio.create_task(
            service.client.generate(greedy(prompt[number:], 600, ignore_eos=True), 60, lambda piece: begun.set())
        )
        for number in range(4)
    ]
    await begun.wait()
    lost = await kill_running(service, ["decode-1", "decode-2"])
    for number, answer in enumerate(answers := await asyncio.gather(*requests)):
        assert answer.token_ids == oracle.greedy(prompt[number:], 600, ignore_eos=True, guess=answer.token_ids)
        assert {served.decode_worker for served in answer.served_by} == {"decode-1", "decode-2"} - {lost}
    assert any(answer.served_by[0].attempts > 1 for answer in answers)
    await until_gone(service, lost)
    await until_idle(service)
    return lost


async def no_decode_worker_is_left(service: Service, last: str) -> None:
    def kill(piece: pb.Piece) -> None:
        service.kill(last)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.client.generate(greedy(random_prompt(50, seed=12), 3000, ignore_eos=True), 30, kill)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "no decode worker" in (caught.value.details() or "")
    await until_idle(service)

    await service.start_worker("decode")
    answer = await ask(service.client, random_prompt(50, seed=13), 5)
    assert answer.served_by[0].decode_worker == "decode-3"
