"""250 mixed requests at concurrency 16: only the client's own mistakes fail, nothing stays behind, memory is flat."""

import asyncio
import random
from pathlib import Path

import grpc
import psutil
import pytest

from baton_proto.generated import inference_pb2 as pb
from tests.service import Service, running_service
from tests.spine.prompts import ask, greedy, random_prompt
from tests.spine.worker_view import until_idle, until_tree_is_right

SHIP_MOST = {"router": {"placement": {"local_prefill_tokens": 32}}}
REQUESTS = 250
CONCURRENCY = 16
GROWTH_LIMIT_BYTES = (
    48 * 1024 * 1024
)  # of one process over the second half; pages of the KV pool are touched in the first


@pytest.mark.timeout(300)
async def test_two_hundred_and_fifty_mixed_requests_leave_nothing_behind(tiny_model: Path) -> None:
    async with running_service(tiny_model, 1, 2, SHIP_MOST, engine={"kv_memory": "16MiB"}) as service:
        random_source = random.Random(0)
        kinds = random_source.choices(list(KINDS), weights=[5, 1, 1, 1], k=REQUESTS)
        await run(service, list(enumerate(kinds[: REQUESTS // 2])))
        await until_idle(service)
        before = memory(service)
        await run(service, list(enumerate(kinds[REQUESTS // 2 :], start=REQUESTS // 2)))
        await until_idle(service)
        after = memory(service)
        await until_tree_is_right(service)
    for name, used_bytes in after.items():
        assert used_bytes - before[name] < GROWTH_LIMIT_BYTES, f"{name} grew from {before[name]} to {used_bytes} bytes"


async def run(service: Service, requests: list[tuple[int, str]]) -> None:
    slots = asyncio.Semaphore(CONCURRENCY)

    async def one(seed: int, kind: str) -> None:
        async with slots:
            await KINDS[kind](service, random.Random(seed))

    await asyncio.gather(*(one(seed, kind) for seed, kind in requests))


async def complete(service: Service, chance: random.Random) -> None:
    """Some share a prefix with others."""
    length = int(10 ** chance.uniform(0, 3.3))
    prompt = random_prompt(length, chance.randrange(1_000_000))
    if chance.random() < 0.5:
        prompt = random_prompt(200, chance.randrange(5)) + prompt
    prompt = prompt[:2000]
    max_tokens = chance.randint(1, 40)
    answer = await ask(service.client, prompt, max_tokens, n=chance.choice([1, 1, 1, 2]))
    for choice in answer.choices:
        assert choice.finish_reason in ("stop", "length")
        assert len(choice.token_ids) == max_tokens or choice.finish_reason == "stop"


async def cancel(service: Service, chance: random.Random) -> None:
    request = greedy(random_prompt(chance.randint(1, 1500), chance.randrange(1_000_000)), 200, ignore_eos=True)
    task = asyncio.create_task(service.client.generate(request, 60))
    await asyncio.sleep(chance.uniform(0, 0.3))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def stop(service: Service, chance: random.Random) -> None:
    prompt = random_prompt(chance.randint(1, 300), chance.randrange(1_000_000))
    answer = await ask(service.client, prompt, 60, stop=["e", "t"], ignore_eos=True)
    assert "e" not in answer.text
    assert "t" not in answer.text


async def bad(service: Service, chance: random.Random) -> None:
    request, status = chance.choice(
        [
            (greedy([5000], 5), grpc.StatusCode.INVALID_ARGUMENT),
            (greedy([], 5), grpc.StatusCode.INVALID_ARGUMENT),
            (greedy(random_prompt(5000, 1), 5), grpc.StatusCode.INVALID_ARGUMENT),
            (greedy([5], 5, top_p=2.0), grpc.StatusCode.INVALID_ARGUMENT),
            (greedy([5], 100_000), grpc.StatusCode.INVALID_ARGUMENT),
            (pb.GenerateRequest(model="another", text="x"), grpc.StatusCode.NOT_FOUND),
        ]
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.client.generate(request, 60)
    assert caught.value.code() is status, caught.value.details()


KINDS = {"complete": complete, "cancel": cancel, "stop": stop, "bad": bad}


def memory(service: Service) -> dict[str, int]:
    """Resident bytes of each process, shared pages excluded."""
    processes = {name: psutil.Process(child.pid) for name, child in service.supervisor.children.items()}
    return {name: process.memory_full_info().uss for name, process in processes.items()}
