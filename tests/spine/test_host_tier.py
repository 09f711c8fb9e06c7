"""Workers with a host tier: prefixes leave small slabs and come back, for prefill and for decode, and over a sleep."""

import asyncio
import random
from pathlib import Path

import httpx
from typer.testing import CliRunner

from baton.cli.app import app
from tests.service import Service, running_service
from tests.spine.oracle import Oracle
from tests.spine.prompts import ask, random_prompt
from tests.spine.worker_view import until_idle, until_tree_is_right, until_used

SMALL = {
    "engine": {"kv_memory": "1MiB", "host_kv_memory": "4MiB"},
    "router": {"placement": {"local_prefill_tokens": 0}},
}


async def metric(service: Service, worker_id: str, name: str) -> float:
    address = service.supervisor.ready[worker_id].addresses["metrics"]
    async with httpx.AsyncClient() as http:
        shown = (await http.get(f"http://{address}/metrics")).text
    (line,) = [line for line in shown.splitlines() if line.startswith(f"baton_worker_{name}{{")]
    return float(line.rpartition(" ")[2])


async def test_answers_stay_the_same_while_prefixes_go_and_come(tiny_model: Path) -> None:
    """Eight conversations' beginnings do not fit into the slabs together."""
    dice, oracle = random.Random(3), Oracle(tiny_model)
    beginnings = [random_prompt(300, seed=seed) for seed in range(8)]
    prompts = [dice.choice(beginnings) + random_prompt(10, seed=100 + number) for number in range(40)]
    async with running_service(tiny_model, 1, 1, SMALL) as service:
        for first in range(0, len(prompts), 4):
            some = prompts[first : first + 4]
            answers = await asyncio.gather(*(ask(service.client, prompt, 6) for prompt in some))
            assert [answer.token_ids for answer in answers] == [oracle.greedy(prompt, 6) for prompt in some]
        await until_idle(service)
        await until_tree_is_right(service)
        for worker_id in ("prefill-1", "decode-1"):
            assert await metric(service, worker_id, "kv_blocks_restored_total") > 0
            assert await metric(service, worker_id, "kv_host_blocks") > 0
        for worker in (await service.client.status(5)).workers:
            assert 0 < worker.host_blocks_used <= worker.host_blocks_total == 256
        shown = await asyncio.to_thread(CliRunner().invoke, app, ["status", "--address", service.grpc_address])
        assert "cached + host" in shown.output


async def test_a_worker_wakes_with_the_prefixes_that_it_kept_in_its_host_tier(tiny_model: Path) -> None:
    prompt = random_prompt(320, seed=1)
    async with running_service(tiny_model, 0, 1, SMALL) as service:
        expected = (await ask(service.client, prompt, 6)).token_ids
        await until_idle(service)
        for level, found in ((1, 304), (2, 0)):
            await service.client.sleep("decode-1", level)
            await until_tree_is_right(service)
            await service.client.wake("decode-1")
            await until_used(service)
            answer = await ask(service.client, prompt, 6)
            assert answer.token_ids == expected
            assert answer.usage.cached_tokens == found
            await until_idle(service)
