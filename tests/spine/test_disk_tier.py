"""Workers with a disk tier: what memory has no room for comes back from the disk, also to the next process."""

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from baton.cli.app import app
from tests.service import running_service
from tests.spine.conversations import converse, metric
from tests.spine.prompts import ask, random_prompt
from tests.spine.worker_view import until_gone, until_idle, until_tree_is_right, until_used


def tiers(folder: Path, ranks: int = 1) -> dict[str, Any]:
    """The slab has room for three of the prompts, the host tier for six, and the disk for all."""
    disk = {"folder": str(folder), "size": "16MiB"}
    memory = {"kv_memory": f"{1024 // ranks}KiB", "host_kv_memory": f"{2048 // ranks}KiB"}
    return {
        "engine": {**memory, "disk_kv": disk, "tensor_parallel": ranks},
        "router": {"placement": {"local_prefill_tokens": 0}},
    }


async def test_answers_stay_the_same_while_prefixes_go_to_the_disk_and_come(tiny_model: Path, tmp_path: Path) -> None:
    async with running_service(tiny_model, 1, 1, tiers(tmp_path)) as service:
        await converse(service, tiny_model, num_beginnings=16, num_prompts=80)
        for worker_id in ("prefill-1", "decode-1"):
            assert await metric(service, worker_id, "kv_blocks_read_total") > 0
            assert await metric(service, worker_id, "kv_disk_blocks") > 0
            assert await metric(service, worker_id, "kv_disk_errors_total") == 0
        for worker in (await service.client.status(60)).workers:
            assert 0 < worker.disk_blocks_used <= worker.disk_blocks_total
        shown = await asyncio.to_thread(CliRunner().invoke, app, ["status", "--address", service.grpc_address])
        assert "+ disk" in shown.output


async def test_a_worker_that_is_stopped_leaves_what_its_memory_held_to_the_next_one(
    tiny_model: Path, tmp_path: Path
) -> None:
    prompts = [random_prompt(320, seed=seed) for seed in range(5)]
    async with running_service(tiny_model, 0, 1, tiers(tmp_path)) as service:
        before = [(await ask(service.client, prompt, 6)).token_ids for prompt in prompts]
        await until_idle(service)
        (stopped,) = service.workers("decode")
        assert await metric(service, stopped, "kv_disk_blocks") == 0
        assert await service.stop_worker(stopped)
        await until_gone(service, stopped)
        started = await service.start_worker("decode")
        await until_tree_is_right(service)
        assert await metric(service, started, "kv_disk_blocks") == 5 * 20
        answers = [await ask(service.client, prompt, 6) for prompt in prompts]
        assert [answer.token_ids for answer in answers] == before
        assert answers[0].usage.cached_tokens == 304, "nobody knows yet that computing might be sooner"
        await until_idle(service)


@pytest.mark.parametrize(("ranks", "killed_rank"), [(1, 0), (2, 1)])
async def test_a_worker_that_was_killed_finds_its_prefixes_again(
    tiny_model: Path, tmp_path: Path, ranks: int, killed_rank: int
) -> None:
    prompts = [random_prompt(320, seed=seed) for seed in range(16)]
    async with running_service(tiny_model, 0, 1, tiers(tmp_path, ranks)) as service:
        before = [(await ask(service.client, prompt, 6)).token_ids for prompt in prompts]
        await until_idle(service)
        (killed,) = service.workers("decode")
        if killed_rank:
            psutil.Process(service.pid(killed)).children()[killed_rank - 1].kill()
        else:
            service.kill(killed)
        await until_gone(service, killed)
        await service.start_worker("decode")
        await until_used(service)
        await until_tree_is_right(service)
        answers = [await ask(service.client, prompt, 6) for prompt in prompts]
        assert [answer.token_ids for answer in answers] == before
        assert max(answer.usage.cached_tokens for answer in answers) > 0
        await until_idle(service)
