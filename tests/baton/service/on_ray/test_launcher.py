"""What a worker gets of a Ray cluster, and gives back. The GPUs here are such by name alone."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from baton.service.launcher import Launch
from runtime.config.planner import PlannerConfig
from runtime.config.serving import EngineConfig, ServingConfig
from runtime.errors import UnavailableError
from runtime.processes.process import ProcessFailedError
from tests.ray_cluster import ray_cluster
from tests.service import assert_gone

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(300)]

FREED_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    from baton.service.on_ray.cluster import connected

    with ray_cluster(head_cpus=4, head_gpus=2) as cluster, connected(cluster.address, "gpus"):
        yield


def worker(model: Path, ranks: int) -> Launch:
    config = ServingConfig(model=str(model), engine=EngineConfig(threads=1))
    return Launch("decode-1", "decode_worker", config, ["--worker-id", "decode-1"], {"decode-1": "decode"}, ranks)


def free(resource: str) -> float:
    import ray

    amount: float = ray.available_resources().get(resource, 0.0)
    return amount


async def test_a_tensor_parallel_worker_gets_its_gpus_in_one_placement_group_and_gives_them_back(
    cluster: None, tiny_model: Path
) -> None:
    from ray.util import placement_group_table

    from baton.service.on_ray.launcher import RayLauncher

    launch = worker(tiny_model, 2)
    launcher = RayLauncher(launch.config)
    assert (launcher.machines.gpus, launcher.machines.cores) == (2, 4)
    process = launcher.process(launch)
    await process.start()
    assert psutil.Process(process.pid).environ()["CUDA_VISIBLE_DEVICES"] in ("0,1", "1,0")
    (group,) = placement_group_table().values()
    assert group["strategy"] == "STRICT_PACK"
    assert list(group["bundles"].values()) == [{"CPU": 2.0, "GPU": 2.0}]
    await process.kill()
    launcher.release(process)
    assert_gone([process.pid])
    async with asyncio.timeout(FREED_S):
        while (free("GPU"), free("CPU")) != (2.0, 4.0):
            await asyncio.sleep(0.1)
    (group,) = placement_group_table().values()
    assert group["state"] == "REMOVED"


async def test_a_worker_that_wants_more_gpus_than_any_node_has_is_given_up_and_holds_nothing(
    cluster: None, tiny_model: Path
) -> None:
    from baton.service.on_ray.launcher import RayLauncher

    launch = worker(tiny_model, 4)
    launcher = RayLauncher(ServingConfig(planner=PlannerConfig(start_s=0.5)))
    process = launcher.process(launch)
    with pytest.raises(ProcessFailedError, match="it takes 4 GPU, and no node has more than 2"):
        await process.start()
    assert not process.alive
    launcher.release(process)
    assert await launcher.living() == []


def test_nodes_that_do_not_join_are_given_up(cluster: None) -> None:
    from baton.service.on_ray.cluster import wait_for_nodes

    told: list[str] = []
    with pytest.raises(UnavailableError, match=r"1 of 2 nodes have joined the cluster within 0\.1 s"):
        wait_for_nodes(2, lambda line, **_: told.append(line), timeout_s=0.1)
    assert told == ["waiting for nodes: 1 of 2 are there"]
