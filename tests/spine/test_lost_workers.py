"""kill -9 in mid-request: with another worker alive the client gets the exact answer, with none a clear error."""

import asyncio
from pathlib import Path

import grpc
import pytest

from baton_proto.generated import inference_pb2 as pb
from runtime.calls.answer import Answer
from tests.service import TRANSPORTS, Service, running_service
from tests.spine.busy import killed_while_busy
from tests.spine.oracle import Oracle
from tests.spine.prompts import ask, greedy, random_prompt
from tests.spine.worker_view import until_gone, until_idle

SHIP_ALL = {"router": {"placement": {"local_prefill_tokens": 0}, "no_worker_timeout_s": 2.0}}
SLOW_PROMPTS = {"max_batch_tokens": 8}  # a long prompt takes hundreds of steps
LONG_TOKENS = 2400  # of an answer: two seconds on a quiet machine, so that the worker is killed before its end


async def killed_in_mid_prompt(service: Service, oracle: Oracle, callers: int, first_seed: int) -> tuple[str, set[str]]:
    """Kills a prefill worker that is busy with a prompt; returns its id, and the prefill workers of the answers that
    were begun again, all of which are right."""

    def prompt(number: int) -> list[int]:
        return random_prompt(3000, seed=first_seed + number)

    lost, answers = await killed_while_busy(
        service,
        service.workers("prefill"),
        lambda number: ask(service.client, prompt(number), 12),
        callers,
        prompt_tokens=2000,
    )
    for number, answer in answers.items():
        assert answer.token_ids == oracle.greedy(prompt(number), 12, guess=answer.token_ids)
    served = [answer.served_by[0] for answer in answers.values()]
    return lost, {one.prefill_worker for one in served if one.attempts > 1}


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_prefill_workers_killed_in_mid_prompt_cost_no_answer(
    tiny_model: Path, oracle: Oracle, transport: str
) -> None:
    """One of two, and then the other."""
    transfer = {"transport": transport}
    async with running_service(tiny_model, 2, 1, SHIP_ALL, engine=SLOW_PROMPTS, transfer=transfer) as service:
        lost, served_again = await killed_in_mid_prompt(service, oracle, 3, 0)
        assert served_again == {"prefill-1", "prefill-2"} - {lost}
        await until_idle(service)
        await until_gone(service, lost)
        _, served_again = await killed_in_mid_prompt(service, oracle, 2, 100)
        assert served_again == {""}, "the decode worker runs the prompt"
        await until_idle(service)


async def test_decode_workers_killed_in_mid_stream_lose_and_double_no_token(tiny_model: Path, oracle: Oracle) -> None:
    """One of two, and then the other: the client gets a clear error in time."""
    async with running_service(tiny_model, 1, 2, SHIP_ALL) as service:
        lost = await a_decode_worker_is_left(service, oracle)
        await no_decode_worker_is_left(service, *({"decode-1", "decode-2"} - {lost}))


async def a_decode_worker_is_left(service: Service, oracle: Oracle) -> str:
    """The id of the lost one."""
    begun = asyncio.Event()

    def prompt(number: int) -> list[int]:
        return random_prompt(100, seed=100 + number)

    async def answer_of(number: int) -> Answer:
        return await service.client.generate(
            greedy(prompt(number), LONG_TOKENS, ignore_eos=True), 60, lambda piece: begun.set()
        )

    lost, answers = await killed_while_busy(service, ["decode-1", "decode-2"], answer_of, 4, begun=begun)
    for number, answer in answers.items():
        assert answer.token_ids == oracle.greedy(prompt(number), LONG_TOKENS, ignore_eos=True, guess=answer.token_ids)
    served_again = {one.served_by[0].decode_worker for one in answers.values() if one.served_by[0].attempts > 1}
    assert served_again == {"decode-1", "decode-2"} - {lost}
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
