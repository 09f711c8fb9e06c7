"""New weights for running workers: all change or none, and nothing of former weights is used with the new ones."""

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from baton_proto.generated import inference_pb2 as pb
from runtime.calls.worker import WorkerClient
from runtime.errors import UnavailableError
from runtime.security.bearer_keys import bearer
from tests.service import Service, running_service
from tests.spine.oracle import Oracle
from tests.spine.prompts import ask, random_prompt
from tests.spine.worker_view import first_running, until_idle, until_tree_is_right, until_used
from tests.tiny_model import write_tiny_model

SHIP_ALL = {"router": {"placement": {"local_prefill_tokens": 0}}}
PROMPTS = [random_prompt(90 + i, seed=i) for i in range(3)]
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}  # two ranks share them


async def update(service: Service, folder: Path, worker: str = "", timeout_s: float = 30.0) -> list[pb.WorkerWeights]:
    return list((await service.client.update_weights(str(folder), worker, timeout_s)).workers)


async def notes(service: Service) -> dict[str, str]:
    return {worker.worker_id: worker.note for worker in (await service.client.status(60)).workers}


async def answers_are_of(folder: Path, service: Service, prefill: str) -> None:
    oracle = Oracle(folder)
    for prompt in PROMPTS:
        answer = await ask(service.client, prompt, 8)
        assert answer.token_ids == oracle.greedy(prompt, 8)
        assert answer.served_by[0].prefill_worker == prefill


async def refusal(service: Service, folder: Path, worker: str = "", timeout_s: float = 30.0) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await update(service, folder, worker, timeout_s)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    return refused.value.details() or ""


def altered(source: Path, folder: Path, **tensors: np.ndarray) -> Path:
    shutil.copytree(source, folder)
    save_file(load_file(source / "model.safetensors") | tensors, folder / "model.safetensors")
    return folder


async def test_a_service_answers_as_one_that_was_started_with_the_new_weights(tmp_path: Path) -> None:
    old, new = write_tiny_model(tmp_path / "old"), write_tiny_model(tmp_path / "new", seed=1)
    async with running_service(old, 1, 1, SHIP_ALL) as service:
        await answers_are_of(old, service, "prefill-1")

        wrong = altered(new, tmp_path / "wrong", **{"model.norm.weight": np.ones(63, np.float32)})
        said = await refusal(service, wrong)
        assert said.startswith("no weights were changed: decode-1 keeps its weights: model ")
        assert f"prefill-1 keeps its weights: model {wrong}: tensor model.norm.weight has shape [63], expected" in said
        other = write_tiny_model(tmp_path / "other", rope_theta=5e5)
        assert "config.json says rope.theta 500000.0, and 10000.0 is served" in await refusal(service, other)
        assert "is no absolute path of a folder" in await refusal(service, tmp_path / "missing")
        (tmp_path / "link").symlink_to("/etc")
        for strange in (Path("/etc"), Path("/nowhere"), tmp_path / ".." / "other", tmp_path / "link"):
            assert "lies in none of workers.weights_folders" in await refusal(service, strange)
        await answers_are_of(old, service, "prefill-1")

        command = [sys.executable, "-m", "baton", "update-weights", "--all", "--model", str(new), "--json"]
        command += ["--address", service.grpc_address]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=110)
        rows = json.loads(done.stdout)
        assert [(row["worker_id"], row["state"], row["problem"]) for row in rows] == [
            ("decode-1", "ready", ""),
            ("prefill-1", "ready", ""),
        ], done.stderr
        assert len({row["model_hash"] for row in rows}) == 1
        await until_used(service)
        assert (await ask(service.client, PROMPTS[0], 1)).usage.cached_tokens == 0
        await answers_are_of(new, service, "prefill-1")
        await until_idle(service)
        await until_tree_is_right(service)

        # Of different weights, they are no pair.
        (ahead,) = await update(service, old, "prefill-1")
        assert ahead.model_hash != rows[0]["model_hash"]
        async with asyncio.timeout(60):
            while "no decode worker has its weights" not in (await notes(service))["prefill-1"]:
                await asyncio.sleep(0.01)
        fresh = random_prompt(120, seed=50)
        answer = await ask(service.client, fresh, 8)
        assert (answer.token_ids, answer.served_by[0].prefill_worker) == (Oracle(new).greedy(fresh, 8), "")
        operator = {"authorization": bearer(service.supervisor.keys.operator[0])}
        async with httpx.AsyncClient(base_url=service.http_url, headers=operator, timeout=60) as http:
            path = "/update_weights"
            assert (await http.post(path, headers={"authorization": "Bearer other"})).status_code == 401
            assert (await http.post(path)).json()["error"]["param"] == "model"
            reply = await http.post(path, params={"model": str(old), "worker": "decode-1"})
        assert [row["model_hash"] for row in reply.json()["workers"]] == [ahead.model_hash]
        await until_used(service)
        assert not any((await notes(service)).values())
        await answers_are_of(old, service, "prefill-1")
        await until_idle(service)


async def test_none_changes_when_one_does_not_drain_and_an_update_that_broke_off_can_be_repeated(
    tmp_path: Path,
) -> None:
    old, new = write_tiny_model(tmp_path / "old"), write_tiny_model(tmp_path / "new", seed=1)
    disk = {"folder": str(tmp_path / "disk"), "size": "16MiB"}
    tiers = {"kv_memory": "4MiB", "host_kv_memory": "1MiB", "disk_kv": disk}
    async with running_service(old, 0, 2, {"engine": tiers}) as service:
        for seed in range(48):  # more than memory has room for
            await ask(service.client, random_prompt(320, seed=seed), 1)
        (former,) = (tmp_path / "disk").glob("*/")  # beside the secret
        long = asyncio.create_task(ask(service.client, random_prompt(40, seed=1), 3900, ignore_eos=True))
        busy = await first_running(service, ["decode-1", "decode-2"])
        said = await refusal(service, new, timeout_s=0.01)
        assert said == f"no weights were changed: {busy} keeps its weights: 1 requests are in flight after 0.0 s"
        await until_used(service)
        assert len((await long).token_ids) == 3900
        await answers_are_of(old, service, "")

        record = next(one for one in (await service.client.status(60)).workers if one.worker_id == "decode-1")
        async with WorkerClient("decode-1", record.address, service.supervisor.keys.cluster) as worker:
            held = await worker.update("hold", str(new), 5.0)
            assert held.state == "draining"
            with pytest.raises(UnavailableError, match="another update is under way"):
                await worker.update("hold", str(new), 5.0)
            with pytest.raises(UnavailableError, match="stays as it is: its weights are being updated"):
                await worker.sleep(1, 5.0)
            write_tiny_model(tmp_path / "again", seed=2)
            (tmp_path / "again" / "model.safetensors").rename(new / "model.safetensors")
            with pytest.raises(UnavailableError, match=r"is not ready: .*: its files changed while they were read"):
                await worker.update("load", str(new), 5.0)
            assert (await worker.inspect()).state == "draining"
            with pytest.raises(UnavailableError, match="was not held for these weights"):
                await worker.update("load", str(new), 5.0)
        answer = await ask(service.client, PROMPTS[0], 8)
        assert (answer.token_ids, answer.served_by[0].decode_worker) == (Oracle(old).greedy(PROMPTS[0], 8), "decode-2")

        assert [(row.state, row.problem) for row in await update(service, new)] == [("ready", "")] * 2
        await until_used(service)
        await answers_are_of(new, service, "")
        again = await ask(service.client, random_prompt(320, seed=7), 8)
        assert (again.usage.cached_tokens, again.token_ids) == (0, Oracle(new).greedy(random_prompt(320, seed=7), 8))
        assert former not in list((tmp_path / "disk").iterdir())
        await until_tree_is_right(service)


async def test_workers_that_sleep_or_have_several_ranks_take_new_weights_too(tmp_path: Path) -> None:
    old, new = write_tiny_model(tmp_path / "old", **HEADS), write_tiny_model(tmp_path / "new", seed=1, **HEADS)
    async with running_service(old, 1, 1, SHIP_ALL, engine={"device": "cpu", "tensor_parallel": 2}) as service:
        await answers_are_of(old, service, "prefill-1")
        await service.client.sleep("decode-1", 2)
        await service.client.sleep("prefill-1", 1)
        assert [(row.state, row.problem) for row in await update(service, new)] == [("sleeping", "")] * 2
        for name in ("decode-1", "prefill-1"):
            assert (await service.client.wake(name)).state == "ready"
        await until_used(service)
        await answers_are_of(new, service, "prefill-1")
        assert [row.state for row in await update(service, old)] == ["ready"] * 2
        await until_used(service)
        await answers_are_of(old, service, "prefill-1")
        await until_idle(service)
