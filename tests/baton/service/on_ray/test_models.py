"""Several models on a Ray cluster: brought up, taken over by the next control actor, changed by a file, ended."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.runs.run_file import run_at
from runtime.calls.router import Client
from tests.baton.service.on_ray.test_commands import RayService, own_processes
from tests.ray_cluster import ray_cluster
from tests.spine.oracle import Oracle
from tests.spine.prompts import greedy, random_prompt
from tests.tiny_model import write_tiny_model

NAMES = ("one", "two", "three")
PROMPT, TOKENS = random_prompt(60, seed=2), 12
WAIT_S = 60.0


async def answers(service: RayService, *names: str) -> list[list[int]]:
    async with Client(service.grpc) as client:
        requests = [greedy(PROMPT, TOKENS) for _ in names]
        for request, name in zip(requests, names, strict=True):
            request.model = name
        told = await asyncio.gather(*(client.generate(request, WAIT_S) for request in requests))
    return [answer.token_ids for answer in told]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
async def test_several_models_are_served_taken_over_and_changed_by_a_file(tmp_path: Path) -> None:
    written = {name: write_tiny_model(tmp_path / name, seed=seed) for seed, name in enumerate(NAMES, 3)}
    right = {name: Oracle(path).greedy(PROMPT, TOKENS) for name, path in written.items()}
    entries = {name: {"name": name, "model": str(path)} for name, path in written.items()}
    settings: dict[str, Any] = {
        "router": {"http_port": 0, "grpc_port": 0},
        "workers": {"prefill": 0, "decode": 1, "drain_timeout_s": 10.0},
        "engine": {"device": "cpu", "kv_memory": "16MiB", "threads": 1},
    }
    file = tmp_path / "serving.yaml"
    with ray_cluster() as cluster:
        service = RayService(cluster, tmp_path)
        file.write_text(yaml.safe_dump(settings | {"models": [entries["one"], entries["two"]]}))
        done = service.up()
        assert done.returncode == 0, done.stderr
        assert await answers(service, "one", "two") == [right["one"], right["two"]]

        pids = dict(service.pids)
        assert pids.keys() >= {"router-1", "decode-one-1", "decode-two-1"}
        (control,) = own_processes("ray::Control")
        control.kill()
        done = service.up()
        assert (done.returncode, service.pids) == (0, pids), done.stderr

        file.write_text(yaml.safe_dump(settings | {"models": [entries["one"], entries["three"]]}))
        run = await asyncio.to_thread(run_at, service.grpc)
        assert run is not None
        arguments = ("rollout", "--json", "--config", str(file), "--nats-url", run.file.nats)
        done = await asyncio.to_thread(service.baton_here, *arguments)
        assert done.returncode == 0, done.stderr
        rows = json.loads(done.stdout.splitlines()[0])["rows"]
        assert "decode-one-1" not in {row["process"] for row in rows}
        assert await answers(service, "one", "three") == [right["one"], right["three"]]
        assert service.baton("down").returncode == 0
