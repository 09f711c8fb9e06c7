"""The NATS servers of a service, its own or others': each may die, with its machine too, and nothing else ends."""

import asyncio
import os
import shutil
import signal
from pathlib import Path

import pytest

from baton.service.launcher import NATS
from baton.service.local.nats_server import NatsServer
from baton_proto.generated import inference_pb2 as pb
from runtime.address import parse_address
from runtime.calls.router import Client
from runtime.security.secret import Secret
from tests.baton.service.test_service_run import KEY, WAIT_S, Told, blocks_after_a_request, running
from tests.freezing import freeze
from tests.ray_cluster import HEAD_ADDRESS, ray_cluster

NAMES = ["nats-1", "nats-2", "nats-3"]
WORKERS = {"prefill": 0, "decode": 1}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["off", "on"])
async def test_each_of_three_servers_is_killed_and_wiped_and_the_router_knows_all_blocks(
    tmp_path: Path, mode: str
) -> None:
    nats = {"servers": 3, "store_dir": str(tmp_path)}
    async with running(nats=nats, workers=WORKERS, security={"internal_tls": mode}) as (told, task):
        before = dict(told.addresses)
        held = await blocks_after_a_request(told, expected_cached=0)
        for name in NAMES:
            os.kill(told.pids[name], signal.SIGSTOP)
            shutil.rmtree(tmp_path / name)
            os.kill(told.pids[name], signal.SIGKILL)
            assert await blocks_after_a_request(told, expected_cached=96) == held
            await told.until({"event": "ready", "id": name})
        assert told.addresses == before
        await trees_are_equal(told)
        assert not task.done()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
async def test_on_a_ray_cluster_they_are_on_three_nodes_and_one_whose_node_dies_goes_to_another() -> None:
    from baton.service.on_ray.cluster import connected

    with ray_cluster(head_cpus=4) as cluster:
        nodes = {
            address: cluster.add_node(num_cpus=1, node_ip_address=address) for address in ("127.0.0.3", "127.0.0.4")
        }
        with connected(cluster.address, "three-nats"):
            from baton.service.on_ray.launcher import RayLauncher

            async with running(RayLauncher, nats={"servers": 3}, workers=WORKERS) as (told, task):
                hosts = {name: host_of(told, name) for name in NAMES}
                assert {*hosts.values()} == {HEAD_ADDRESS, *nodes}
                lost = next(name for name in NAMES if hosts[name] == "127.0.0.4")
                cluster.add_node(num_cpus=1, node_ip_address="127.0.0.5")
                cluster.remove_node(nodes["127.0.0.4"], allow_graceful=False)
                await told.until({"event": "ready", "id": lost})
                assert host_of(told, lost) == "127.0.0.5"
                await blocks_after_a_request(told, expected_cached=0)
                await trees_are_equal(told)
                assert not task.done()


@pytest.mark.parametrize("how", ["killed", "wiped", "stopped"])
async def test_a_server_of_somebody_else_may_be_away_and_nothing_ends(nats_server: NatsServer, how: str) -> None:
    async with running(nats={"url": nats_server.url}, workers=WORKERS) as (told, task):
        pids = dict(told.pids)
        held = await blocks_after_a_request(told, expected_cached=0)
        if how == "stopped":
            freeze(nats_server.pid)
        else:
            await nats_server.kill()
        for _ in range(3):
            assert await blocks_after_a_request(told, expected_cached=96) == held
        if how == "stopped":
            os.kill(nats_server.pid, signal.SIGCONT)
        else:
            await nats_server.restart(lose_storage=how == "wiped")
        await trees_are_equal(told)
        assert told.pids == pids
        assert not task.done()


def host_of(told: Told, name: str) -> str:
    return parse_address(told.addresses[name][NATS].rpartition("/")[2])[0]


async def trees_are_equal(told: Told) -> None:
    async with Client(told.addresses["router-1"]["grpc"], operator_key=Secret(KEY)) as client, asyncio.timeout(WAIT_S):
        while [one.verdict for one in await client.diff(pb.DiffRequest())] != [pb.DIFF_VERDICT_EQUAL]:
            await asyncio.sleep(0.05)
