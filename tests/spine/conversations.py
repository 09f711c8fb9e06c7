"""Requests over more beginnings than memory holds, and what workers count meanwhile."""

import asyncio
import random
from pathlib import Path

import httpx

from tests.service import Service
from tests.spine.oracle import Oracle
from tests.spine.prompts import ask, random_prompt
from tests.spine.worker_view import until_idle, until_tree_is_right


async def converse(service: Service, model: Path, *, num_beginnings: int, num_prompts: int) -> None:
    """Prompts of 310 tokens that begin with one of some 300, four at a time, each answered exactly; then the tree is
    right."""
    dice, oracle = random.Random(3), Oracle(model)
    beginnings = [random_prompt(300, seed=seed) for seed in range(num_beginnings)]
    prompts = [dice.choice(beginnings) + random_prompt(10, seed=100 + number) for number in range(num_prompts)]
    for first in range(0, len(prompts), 4):
        some = prompts[first : first + 4]
        answers = await asyncio.gather(*(ask(service.client, prompt, 6) for prompt in some))
        found = [answer.token_ids for answer in answers]
        expected = [oracle.greedy(prompt, 6, guess=guess) for prompt, guess in zip(some, found, strict=True)]
        assert found == expected, f"prompts {first} to {first + 3}: {found} instead of {expected}"
    await until_idle(service)
    await until_tree_is_right(service)


async def metric(service: Service, worker_id: str, name: str) -> float:
    address = service.supervisor.ready[worker_id].addresses["metrics"]
    async with httpx.AsyncClient(timeout=60) as http:
        shown = (await http.get(f"http://{address}/metrics")).text
    (line,) = [line for line in shown.splitlines() if line.startswith(f"baton_worker_{name}{{")]
    return float(line.rpartition(" ")[2])
