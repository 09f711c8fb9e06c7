"""Workers with a host tier: prefixes leave small slabs and come back, for prefill and for decode, and over a sleep."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from baton.cli.app import app
from baton_proto.generated import inference_pb2 as pb
from tests.service import DEVICE, NEEDS_TWO, ON_DEVICE, running_service
from tests.spine.conversations import converse, metric
from tests.spine.prompts import ask, greedy, random_prompt
from tests.spine.worker_view import until_gone, until_idle, until_tree_is_right, until_used

RANKS = pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=NEEDS_TWO)])


def small(ranks: int) -> dict[str, Any]:
    """As many blocks with any number of ranks."""
    memory = {"kv_memory": f"{1024 // ranks}KiB", "host_kv_memory": f"{4096 // ranks}KiB"}
    return {
        "engine": ON_DEVICE | memory | {"block_size": 16, "tensor_parallel": ranks},
        "router": {"placement": {"local_prefill_tokens": 0}},
    }


@RANKS
async def test_answers_stay_the_same_while_prefixes_go_and_come(tiny_model: Path, ranks: int) -> None:
    """Eight conversations' beginnings do not fit into the slabs together."""
    async with running_service(tiny_model, 1, 1, small(ranks)) as service:
        await converse(service, tiny_model, num_beginnings=8, num_prompts=40)
        for worker_id in ("prefill-1", "decode-1"):
            assert await metric(service, worker_id, "kv_blocks_restored_total") > 0
            assert await metric(service, worker_id, "kv_host_blocks") > 0
            assert await metric(service, worker_id, "kv_blocks_lowered_total") > 0
        summary, _ = await service.client.tree(pb.TreeRequest(), 60)
        known = {owner.worker_id: owner.host_blocks for owner in summary.workers}
        for worker in (await service.client.status(60)).workers:
            assert 0 < worker.host_blocks_used <= worker.host_blocks_total == 256
            assert known[worker.worker_id] == worker.host_blocks_used
        assert [found.verdict for found in await service.client.diff(pb.DiffRequest(), 10)] == [
            pb.DIFF_VERDICT_EQUAL
        ] * 2
        shown = await asyncio.to_thread(CliRunner().invoke, app, ["status", "--address", service.grpc_address])
        assert "cached + host" in shown.output


@pytest.mark.skipif(DEVICE == "cuda", reason="this is a transport of CPU workers")
async def test_a_new_decode_worker_gets_prefixes_from_the_host_tier_of_the_prefill_worker(tiny_model: Path) -> None:
    """What comes back is in the slab before a transport sees it, whichever that is."""
    prompts = [random_prompt(310, seed=seed) for seed in range(8)]  # the slab has room for three
    overrides = {**small(1), "transfer": {"transport": "shm", "checksum": True}}
    async with running_service(tiny_model, 1, 1, overrides) as service:
        before = [(await ask(service.client, prompt, 6)).token_ids for prompt in prompts]
        assert await service.stop_worker("decode-1")
        await until_gone(service, "decode-1")
        await service.start_worker("decode")
        await until_used(service)
        answers = [await ask(service.client, prompt, 6) for prompt in prompts]
        assert [answer.token_ids for answer in answers] == before
        assert [answer.usage.cached_tokens for answer in answers] == [304] * 8
        assert {(answer.served_by[0].transport, answer.served_by[0].kv_blocks) for answer in answers} == {("shm", 20)}
        assert await metric(service, "prefill-1", "kv_blocks_restored_total") >= 5 * 19
        await until_idle(service)


@RANKS
async def test_a_worker_wakes_with_the_prefixes_that_it_kept_in_its_host_tier(tiny_model: Path, ranks: int) -> None:
    prompt = random_prompt(320, seed=1)
    async with running_service(tiny_model, 0, 1, small(ranks)) as service:
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


async def test_a_prompt_that_was_to_stay_is_found_when_others_have_come_after_it(tiny_model: Path) -> None:
    """Over HTTP and gRPC, on prefill and decode workers, whose slabs hold three such prompts."""
    kept, dropped = random_prompt(304, seed=1), random_prompt(304, seed=2)
    body = {"model": "tiny-llama", "prompt": kept, "max_tokens": 1, "temperature": 0, "keep_cache_s": 60}
    without_tier = {**small(1), "engine": ON_DEVICE | {"kv_memory": "1MiB", "block_size": 16}}
    async with running_service(tiny_model, 1, 1, without_tier) as service:
        async with httpx.AsyncClient(base_url=f"{service.http_url}/v1", timeout=60) as client:
            assert (await client.post("/completions", json=body)).is_success
        drop = greedy(dropped, 1)
        drop.drop_cache = True
        await service.client.generate(drop, 60)
        await until_idle(service)
        for worker_id in ("prefill-1", "decode-1"):
            assert await metric(service, worker_id, "kv_blocks_kept") == 16
        for seed in range(10, 16):
            await ask(service.client, random_prompt(304, seed=seed), 1)
        await until_idle(service)
        await until_tree_is_right(service)
        assert (await ask(service.client, [*kept, 5], 1)).usage.cached_tokens == 256
