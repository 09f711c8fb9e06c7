"""What a worker gets of a Ray cluster, and gives back. The GPUs here are such by name alone."""

import asyncio
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import msgspec
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
    assert [group["state"] for group in placement_group_table().values()] == ["REMOVED"]


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


async def test_an_actor_that_takes_longer_than_the_wait_for_room_is_waited_for_in_the_place_that_it_holds(
    cluster: None, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from baton.service.on_ray.launcher import RayLauncher

    monkeypatch.setattr("baton.service.on_ray.room.PLACED_S", 0.5)
    launch = worker(tiny_model, 2)
    launcher = RayLauncher(msgspec.structs.replace(launch.config, planner=PlannerConfig(start_s=0.5)))
    process = launcher.process(launch)
    monkeypatch.setattr("baton.service.on_ray.launcher.answer", late)
    await process.start()
    assert process.alive
    await process.kill()
    launcher.release(process)


async def late(call: Awaitable[Any]) -> Any:
    await asyncio.sleep(1.5)  # beyond twice `start_s`, as on a machine whose cores are busy
    return await call


async def test_a_place_whose_actor_has_died_is_given_back_by_the_next_supervisor(
    cluster: None, tiny_model: Path
) -> None:
    import ray

    from baton.service.on_ray.launcher import RayLauncher

    launch = worker(tiny_model, 2)
    launcher = RayLauncher(launch.config)
    process = launcher.process(launch)
    await process.start()
    ray.kill(ray.get_actor("decode-1"))
    await process.wait()
    assert await RayLauncher(launch.config).living() == []
    async with asyncio.timeout(FREED_S):
        while (free("GPU"), free("CPU")) != (2.0, 4.0):
            await asyncio.sleep(0.1)


def test_nodes_that_do_not_join_are_given_up(cluster: None) -> None:
    from baton.service.on_ray.cluster import wait_for_nodes

    told: list[str] = []
    with pytest.raises(UnavailableError, match=r"1 of 2 nodes have joined the cluster within 0\.1 s"):
        wait_for_nodes(2, lambda line, **_: told.append(line), timeout_s=0.1)
    assert told == ["waiting for nodes: 1 of 2 are there"]
