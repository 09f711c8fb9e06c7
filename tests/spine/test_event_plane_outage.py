"""NATS stopped and started again: requests go on, and the router's tree is right again within seconds."""

import asyncio
import shutil
from pathlib import Path

import pytest

from runtime.discovery.directory import TTL_S
from tests.service import running_service
from tests.spine.oracle import Oracle
from tests.spine.prompts import ask, random_prompt
from tests.spine.worker_view import until_idle, until_tree_is_right

SHIP_ALL = {"router": {"placement": {"local_prefill_tokens": 0}}}


@pytest.mark.parametrize("storage_survives", [True, False], ids=["storage survives", "storage is lost"])
async def test_requests_go_on_without_nats_and_the_tree_recovers(
    tiny_model: Path, tmp_path: Path, storage_survives: bool
) -> None:
    oracle = Oracle(tiny_model)
    store_dir = tmp_path / "nats"
    async with running_service(tiny_model, 2, 2, SHIP_ALL, nats={"store_dir": str(store_dir)}) as service:
        before = random_prompt(100, seed=1)
        in_flight = asyncio.create_task(ask(service.client, before, 400, ignore_eos=True))
        await asyncio.sleep(0)
        await service.nats.stop()
        during = random_prompt(300, seed=2)
        first = await ask(service.client, during, 8)
        assert first.token_ids == oracle.greedy(during, 8, guess=first.token_ids)
        answer = await in_flight
        assert answer.token_ids == oracle.greedy(before, 400, ignore_eos=True, guess=answer.token_ids)
        await asyncio.sleep(TTL_S + 1)  # longer than any worker's time to live
        assert len((await service.client.status(60)).workers) == 4, "nobody is declared dead because NATS is away"

        if not storage_survives:
            shutil.rmtree(store_dir)
        await service.nats.start()
        await until_tree_is_right(service, timeout_s=60)
        again = await ask(service.client, during + random_prompt(30, seed=3), 8)
        assert again.served_by[0].prefill_worker == first.served_by[0].prefill_worker
        assert again.usage.cached_tokens == 288
        await until_idle(service)
