"""Workers that sleep: requests go elsewhere, answers stay the same, memory and cached prefixes go and come back."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from baton_proto.generated import inference_pb2 as pb
from runtime.security.bearer_keys import bearer
from runtime.security.secret import Secret
from tests.service import Service, SharedService, running_service
from tests.spine.oracle import Oracle
from tests.spine.prompts import ask, random_prompt
from tests.spine.worker_view import until_idle, until_running, until_tree_is_right, until_used
from tests.tiny_model import write_tiny_model

BATON = [sys.executable, "-m", "baton"]
SHIP_ALL = {"router": {"placement": {"local_prefill_tokens": 0}}}


async def worker(service: Service, worker_id: str) -> pb.WorkerStatus:
    return next(one for one in (await service.client.status(60)).workers if one.worker_id == worker_id)


async def until_state(service: Service, worker_id: str, state: str) -> None:
    async with asyncio.timeout(60):
        while (await worker(service, worker_id)).state != state:
            await asyncio.sleep(0.01)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def three(tiny_model: Path) -> AsyncIterator[SharedService]:
    async with SharedService(tiny_model, 1, 2, SHIP_ALL) as shared:
        yield shared


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def alone(tiny_model: Path) -> AsyncIterator[SharedService]:
    """A decode worker."""
    async with SharedService(tiny_model, 0, 1) as shared:
        yield shared


@pytest.mark.asyncio(loop_scope="module")
async def test_requests_go_to_those_who_are_awake_and_come_back(three: SharedService, oracle: Oracle) -> None:
    async with three.using() as service:
        prompts = [random_prompt(90 + i, seed=i) for i in range(6)]
        expected = [oracle.greedy(prompt, 8) for prompt in prompts]

        async def all_answered() -> set[tuple[str, str]]:
            answers = await asyncio.gather(*(ask(service.client, prompt, 8) for prompt in prompts))
            assert [answer.token_ids for answer in answers] == expected
            return {(answer.served_by[0].prefill_worker, answer.served_by[0].decode_worker) for answer in answers}

        await all_answered()
        for level in (1, 2):
            slept = await service.client.sleep("decode-1", level)
            assert (slept.state, list(slept.asleep)) == ("sleeping", ["weights", "kv_cache"])
            assert slept.freed_bytes == 64 << 20
            await until_state(service, "decode-1", "sleeping")
            assert await all_answered() == {("prefill-1", "decode-2")}
            await until_idle(service)
            await until_tree_is_right(service)
            assert (await worker(service, "decode-1")).blocks_in_tree == 0
            half = await service.client.wake("decode-1", ["weights"])
            assert (half.state, list(half.asleep)) == ("sleeping", ["kv_cache"])
            assert (await service.client.wake("decode-1")).state == "ready"
            await until_used(service)
            await service.client.sleep("decode-2")
            await until_state(service, "decode-2", "sleeping")
            assert await all_answered() == {("prefill-1", "decode-1")}
            await service.client.wake("decode-2")
            await until_used(service)

        await service.client.sleep("prefill-1")
        await until_state(service, "prefill-1", "sleeping")
        async with httpx.AsyncClient(timeout=60) as http:
            shown = (
                await http.get(f"http://{service.supervisor.ready['prefill-1'].addresses['metrics']}/metrics")
            ).text
        assert 'baton_worker_state{role="prefill",state="sleeping",worker="prefill-1"} 1.0' in shown
        assert {prefill for prefill, _ in await all_answered()} == {""}, "decode workers run prompts themselves"
        await service.client.wake("prefill-1")
        await until_used(service)
        fresh = random_prompt(200, seed=99)
        assert (await ask(service.client, fresh, 8)).served_by[0].prefill_worker == "prefill-1"
        await until_idle(service)


async def test_a_worker_whose_weights_were_replaced_meanwhile_sleeps_on_and_says_why(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    async with running_service(folder, 0, 2) as service:
        prompt, oracle = random_prompt(90, seed=5), Oracle(folder)
        expected = oracle.greedy(prompt, 8)
        await service.client.sleep("decode-1", 2)
        await until_state(service, "decode-1", "sleeping")
        (tmp_path / "new").mkdir()
        weights = write_tiny_model(tmp_path / "new", seed=1) / "model.safetensors"
        weights.rename(folder / "model.safetensors")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await service.client.wake("decode-1")
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        details = refused.value.details() or ""
        assert details.startswith(f"decode-1 sleeps on: model {folder}: the weights on disk are not those that were")
        assert (await worker(service, "decode-1")).state == "sleeping"
        answer = await ask(service.client, prompt, 8)
        assert (answer.token_ids, answer.served_by[0].decode_worker) == (expected, "decode-2")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_worker_with_requests_in_flight_drains_first_or_stays_awake(
    alone: SharedService, oracle: Oracle
) -> None:
    async with alone.using() as service:
        prompt = random_prompt(40, seed=1)
        long = asyncio.create_task(ask(service.client, prompt, 1200, ignore_eos=True))
        await until_running(service, "decode-1")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await service.client.sleep("decode-1", timeout_s=0.01)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert refused.value.details() == "decode-1 stays awake: 1 requests are in flight after 0.0 s"
        await until_state(service, "decode-1", "ready")
        slept = await service.client.sleep("decode-1")
        assert len((await long).token_ids) == 1200, "it was let to its end"
        assert slept.state == "sleeping"
        with pytest.raises(grpc.aio.AioRpcError) as unserved:
            await ask(service.client, prompt, 4, timeout_s=1)
        assert unserved.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        await service.client.wake("decode-1")
        await until_used(service)
        assert (await ask(service.client, prompt, 4)).token_ids == oracle.greedy(prompt, 4)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_command_line_says_what_happened_and_what_is_wrong(alone: SharedService) -> None:
    async with alone.using() as service:

        async def baton(*arguments: str) -> tuple[int, str]:
            command = [*BATON, *arguments, "--address", service.grpc_address]
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=110)
            return done.returncode, done.stdout + done.stderr

        code, text = await baton("sleep", "decode-9")
        assert code != 0
        assert "worker_id: there is no worker 'decode-9'; known are decode-1" in text
        code, text = await baton("wake", "decode-1", "--tags", "weight")
        assert code != 0
        assert "tags: 'weight' is none of weights, kv_cache" in text
        code, text = await baton("sleep", "decode-1", "--level", "2", "--json")
        assert code == 0
        assert json.loads(text)["state"] == "sleeping"
        code, text = await baton("wake", "decode-1")
        assert code == 0
        assert text.startswith("decode-1 is ready, after ")
        for wrong in ((), ("decode-1", "--all")):
            code, text = await baton("sleep", *wrong)
            assert (code, "name one worker, or all of them with --all" in text) == (2, True)
        code, text = await baton("sleep", "--all", "--json")
        assert (code, [worker["state"] for worker in json.loads(text)]) == (0, ["sleeping"])
        code, text = await baton("wake", "--all", "--tags", "weight")
        assert (code, text.endswith("--tags: 'weight' is none of weights, kv_cache\n")) == (2, True)
        code, text = await baton("wake", "--all")
        assert (code, text.startswith("decode-1 is ready, after ")) == (0, True)
        await until_used(service)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_endpoints_of_vllm_ask_one_worker_or_all_and_want_the_operators_key(three: SharedService) -> None:
    async with three.using() as service:
        operator = {"authorization": bearer(service.supervisor.keys.operator[0])}
        async with httpx.AsyncClient(base_url=service.http_url, timeout=60) as http:

            async def post(path: str, headers: dict[str, str] = operator) -> tuple[int, Any]:
                answer = await http.post(path, headers=headers)
                return answer.status_code, answer.json()

            async def sleeping(query: str = "") -> tuple[bool, list[str]]:
                said = (await http.get(f"/is_sleeping{query}", headers=operator)).json()
                return said["is_sleeping"], [worker["state"] for worker in said["workers"]]

            for path in ("/sleep", "/wake_up"):
                for headers in ({}, {"authorization": bearer(Secret("a-user-s-key"))}):
                    status, refused = await post(path, headers)
                    assert (status, refused["error"]["code"]) == (401, "invalid_operator_key")
            assert (await http.get("/is_sleeping")).status_code == 401
            assert (await http.get("/sleep", headers=operator)).status_code == 405
            assert await sleeping() == (False, ["ready"] * 3)

            status, one = await post("/sleep?level=2&worker=decode-1")
            assert (status, [worker["worker_id"] for worker in one["workers"]]) == (200, ["decode-1"])
            assert await sleeping() == (True, ["sleeping", "ready", "ready"])
            assert await sleeping("?worker=decode-2") == (False, ["ready"])
            status, everyone = await post("/sleep")
            assert status == 200
            assert [worker["worker_id"] for worker in everyone["workers"]] == ["decode-1", "decode-2", "prefill-1"]
            assert [worker["state"] for worker in everyone["workers"]] == ["sleeping"] * 3
            for worker_id in ("decode-1", "decode-2"):
                await until_state(service, worker_id, "sleeping")
            wakes = "; asleep: decode-1, decode-2. `baton wake decode-1` or POST /wake_up?worker=decode-1 wakes one"
            not_ready = await http.get("/ready")
            assert (not_ready.status_code, not_ready.json()["status"]) == (503, f"no decode worker is ready{wakes}")
            refused = await http.post("/v1/completions", json={"prompt": [5], "max_tokens": 1})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["message"].endswith(wakes)
            status, half = await post("/wake_up?tags=weights")
            assert [worker["asleep"] for worker in half["workers"]] == [["kv_cache"]] * 3
            assert (await post("/wake_up?tags=weights&tags=kv_cache"))[0] == 200
            assert await sleeping() == (False, ["ready"] * 3)

            for query, field in (("level=3", "level"), ("worker=decode-9", "worker_id")):
                status, refused = await post(f"/sleep?{query}")
                assert (status, refused["error"]["param"]) == (400, field)
            service.kill("decode-2")
            status, partly = await post("/wake_up")
            assert status == 503
            assert "worker decode-2: " in partly["workers"][1]["problem"]
            assert [row.get("state") for row in partly["workers"]] == ["ready", None, "ready"]
    await three.end()  # one of them is lost


async def test_workers_of_several_ranks_sleep_and_wake(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, num_attention_heads=8, num_key_value_heads=8)
    oracle, ranks = Oracle(folder), {"device": "cpu", "tensor_parallel": 2}
    async with running_service(folder, 1, 1, SHIP_ALL, engine=ranks) as service:
        for round_number in range(2):
            prompt = random_prompt(70, seed=round_number)
            answer = await ask(service.client, prompt, 8)
            assert answer.token_ids == oracle.greedy(prompt, 8)
            assert answer.served_by[0].prefill_worker == "prefill-1"
            for name in ("prefill-1", "decode-1"):
                slept = await service.client.sleep(name)
                assert slept.freed_bytes == 2 * 64 << 20, "both ranks"
                assert (await service.client.wake(name)).state == "ready"
            await until_used(service)
        await until_idle(service)
