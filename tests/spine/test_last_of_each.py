"""NATS and all but one router, prefill worker and decode worker are killed one by one: streams lose nothing."""

import asyncio
from itertools import count
from pathlib import Path

from baton.client.async_client import AsyncClient
from baton.client.request import Options
from runtime.calls.answer import Answer
from tests.service import Service, running_service
from tests.spine.oracle import Oracle
from tests.spine.prompts import random_prompt

SERVICE = {"router": {"replicas": 2, "placement": {"local_prefill_tokens": 0}}}
TOKENS = 200  # of an answer, which is under way while one of them dies
CALLERS = 4
GREEDY: Options = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}


async def test_one_router_and_one_worker_of_each_role_are_enough(tiny_model: Path) -> None:
    oracle, answers = Oracle(tiny_model), dict[int, Answer]()
    numbers, running, begun, over = count(), set[int](), asyncio.Event(), asyncio.Event()
    async with running_service(tiny_model, 2, 2, SERVICE) as service:

        async def ask_on() -> None:
            while not over.is_set():
                running.add(number := next(numbers))
                prompt, client = random_prompt(90, seed=number), AsyncClient(service.grpc_address)
                async with client, client.stream(prompt, **GREEDY) as stream:
                    async for piece in stream:
                        if piece.token_ids:
                            begun.set()
                    answers[number] = stream.answer
                running.remove(number)

        async with asyncio.TaskGroup() as group:
            for _ in range(CALLERS):
                group.create_task(ask_on())
            for name in ("nats", "router-2", "prefill-1", "decode-1"):
                begun.clear()
                await begun.wait()
                await kill(service, name)
                before, num_answers = set(running), len(answers)
                # Who loses two workers within a few tokens would be taken for the cause: nobody sees two of them die.
                while before & running or len(answers) <= num_answers + len(before):
                    await asyncio.sleep(0.01)
            over.set()
        for number, answer in answers.items():
            prompt = random_prompt(90, seed=number)
            assert answer.token_ids == oracle.greedy(prompt, TOKENS, ignore_eos=True, guess=answer.token_ids)


async def kill(service: Service, name: str) -> None:
    if name == "nats":
        await service.nats.kill()
    else:
        service.kill(name)
        await service.supervisor.children[name].wait()
