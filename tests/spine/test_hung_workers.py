"""A worker that hangs (stopped with SIGSTOP: alive, connected, silent) costs no answer either, and is used again when
it goes on."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from tests.service import Service, running_service
from tests.spine.busy import killed_while_busy
from tests.spine.oracle import Oracle
from tests.spine.prompts import ask, random_prompt
from tests.spine.worker_view import inspect, until_idle, until_running, until_tree_is_right, until_used

SHIP_ALL = {"router": {"placement": {"local_prefill_tokens": 0}, "no_worker_timeout_s": 2.0}}
SLOW_PROMPTS = {"max_batch_tokens": 16}
LONG = 2000  # tokens: two seconds on a quiet machine, so that a worker hangs before their end
NOTICED_WITHIN_S = 60.0  # half of a lease; five seconds, and time to run the prompt again on a busy machine


@pytest.fixture
async def service(tiny_model: Path) -> AsyncIterator[Service]:
    async with running_service(tiny_model, 1, 2, SHIP_ALL, engine=SLOW_PROMPTS) as service:
        yield service


async def test_hung_workers_cost_no_answer(service: Service, oracle: Oracle) -> None:
    """One service for all of them."""
    await a_prefill_worker_in_mid_prompt(service, oracle)
    await a_decode_worker_in_mid_stream(service, oracle)
    await all_decode_workers(service)


async def a_prefill_worker_in_mid_prompt(service: Service, oracle: Oracle) -> None:
    """Its links are made before, because a transfer that it has not begun leaves nothing reserved."""
    await asyncio.gather(*(ask(service.client, random_prompt(100, seed=seed), 30) for seed in range(11, 15)))
    await until_idle(service)
    prompt = random_prompt(4000, seed=1)
    request = asyncio.create_task(ask(service.client, prompt, 10))
    await until_partly_run(service, "prefill-1", len(prompt))
    service.kill("prefill-1", signal.SIGSTOP)
    start_s = time.monotonic()
    answer = await request
    assert time.monotonic() - start_s < NOTICED_WITHIN_S
    assert answer.token_ids == oracle.greedy(prompt, 10, guess=answer.token_ids)
    assert (answer.served_by[0].prefill_worker, answer.served_by[0].attempts) == ("", 2)
    leases = [(await inspect(service, worker_id)).load.leases for worker_id in ("decode-1", "decode-2")]
    assert sum(leases) == 1, "what it may still write into stays reserved"

    service.kill("prefill-1", signal.SIGCONT)
    await until_used(service)
    await until_idle(service)
    assert (await ask(service.client, random_prompt(100, seed=2), 3)).served_by[0].prefill_worker == "prefill-1"
    await until_tree_is_right(service)


async def a_decode_worker_in_mid_stream(service: Service, oracle: Oracle) -> None:
    def prompt(number: int) -> list[int]:
        return random_prompt(50 + number, seed=3)

    hung, answers = await killed_while_busy(
        service,
        ["decode-1", "decode-2"],
        lambda number: ask(service.client, prompt(number), LONG, ignore_eos=True),
        callers=3,
        kill=lambda worker_id: service.kill(worker_id, signal.SIGSTOP),
    )
    served_again = {one.served_by[0].decode_worker for one in answers.values() if one.served_by[0].attempts > 1}
    assert served_again == {"decode-1", "decode-2"} - {hung}
    for number, answer in answers.items():
        assert answer.token_ids == oracle.greedy(prompt(number), LONG, ignore_eos=True, guess=answer.token_ids)

    service.kill(hung, signal.SIGCONT)
    await until_used(service)
    await until_idle(service)
    await until_tree_is_right(service)


async def all_decode_workers(service: Service) -> None:
    for worker_id in service.workers("decode"):
        service.kill(worker_id, signal.SIGSTOP)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(service.client, [5, 6, 7], 3, timeout_s=30)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "no decode worker" in (caught.value.details() or "")
    for worker_id in service.workers("decode"):
        service.kill(worker_id, signal.SIGCONT)
    await until_used(service)
    await until_idle(service)
    assert len((await ask(service.client, [5, 6, 7], 3)).token_ids) == 3


async def until_partly_run(service: Service, worker_id: str, prompt_tokens: int) -> None:
    """Then the decode worker is connected, and the first chunks' KV is on its way, or there."""
    await until_running(service, worker_id)
    async with asyncio.timeout(60):
        while (left := (await inspect(service, worker_id)).load.queued_prefill_tokens) > prompt_tokens - 1200:
            await asyncio.sleep(0.01)
    assert left > 0, "the prompt was over before it was looked at"
