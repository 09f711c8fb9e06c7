"""The planner's verbs on real processes, this one's children and those on a Ray cluster: asked twice, cancelled in the
middle, and asked for what is gone."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import pytest_asyncio

from baton.service.launcher import Launcher
from baton.service.local.local_launcher import LocalLauncher
from baton.service.planning.supervisor_connector import SupervisorConnector
from baton_proto.planner import DECODE, PREFILL
from planner.acting.connector import ConnectorError, WorkerProcess
from runtime.config.serving import ServingConfig
from tests.ray_cluster import ray_cluster
from tests.service import Service, running_service

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

CPUS = 4  # of the Ray cluster, and so workers that it has room for
START_S = 20.0


@pytest.fixture(scope="module", params=["children", pytest.param("ray", marks=pytest.mark.ray)])
def launcher(request: pytest.FixtureRequest) -> Iterator[Callable[[ServingConfig], Launcher]]:
    if request.param == "children":
        yield LocalLauncher
        return
    with ray_cluster(head_cpus=CPUS) as cluster:  # before anything imports Ray, which reads there how to log in
        from baton.service.on_ray.cluster import connected
        from baton.service.on_ray.launcher import RayLauncher

        with connected(cluster.address, "default"):
            yield RayLauncher


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def service(launcher: Callable[[ServingConfig], Launcher]) -> AsyncIterator[Service]:
    planner = {"enabled": True, "start_s": 7.5}  # a node is waited for twice as long
    async with running_service("mock", 1, 1, launcher=launcher, planner=planner) as running:
        yield running


@pytest.fixture
def told() -> list[tuple[str, str]]:
    """Events and ids."""
    return []


@pytest_asyncio.fixture(loop_scope="module")
async def connector(service: Service, told: list[tuple[str, str]]) -> AsyncIterator[SupervisorConnector]:
    connector = SupervisorConnector(
        service.supervisor, lambda line, *, event, **fields: told.append((event, fields["id"]))
    )
    yield connector
    await connector.close()
    service.note_pids()


async def ready(service: Service) -> dict[str, str]:
    """Roles of the workers that the router uses."""
    status = await service.client.status()
    return {worker.worker_id: worker.role for worker in status.workers if worker.state == "ready" and not worker.note}


def process_of(connector: SupervisorConnector, worker_id: str) -> WorkerProcess | None:
    return next((process for process in connector.processes() if process.worker_id == worker_id), None)


async def test_a_worker_that_is_added_twice_is_started_once_and_used_when_add_returns(
    service: Service, connector: SupervisorConnector
) -> None:
    adding = [asyncio.create_task(connector.add("decode-7", DECODE)) for _ in range(2)]
    async with asyncio.timeout(START_S):
        while (process := process_of(connector, "decode-7")) is None:
            await asyncio.sleep(0)
    assert (process.role, process.leaving) == (DECODE, None)
    await asyncio.gather(*adding)
    assert (await ready(service))["decode-7"] == DECODE
    pid = service.pid("decode-7")
    await connector.add("decode-7", DECODE)
    assert service.pid("decode-7") == pid


async def test_a_drain_that_is_cancelled_goes_on_and_who_asks_again_waits_for_it(
    service: Service, connector: SupervisorConnector, told: list[tuple[str, str]]
) -> None:
    draining = asyncio.create_task(connector.drain("decode-7"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    draining.cancel()
    await asyncio.gather(draining, return_exceptions=True)
    process = process_of(connector, "decode-7")
    assert process is not None
    assert process.leaving == "drain"
    await connector.drain("decode-7")
    assert process_of(connector, "decode-7") is None
    assert "decode-7" not in await ready(service)
    await connector.drain("decode-7")  # of one that is gone
    await connector.remove("decode-7")
    assert told == [("drains", "decode-7")]


async def test_a_flip_keeps_the_id_and_shows_the_old_role_until_it_is_done(
    service: Service, connector: SupervisorConnector
) -> None:
    await connector.add("prefill-8", PREFILL)
    flipping = asyncio.create_task(connector.flip("prefill-8", DECODE))
    seen = set()
    while not flipping.done():
        process = process_of(connector, "prefill-8")
        assert process is not None, "it is there all the time"
        seen.add((process.role, process.leaving))
        await asyncio.sleep(0.01)
    await flipping
    assert seen - {(PREFILL, None), (DECODE, None)} == {(PREFILL, "flip")}  # before it began, after it was done
    process = process_of(connector, "prefill-8")
    assert process is not None
    assert (process.role, process.leaving) == (DECODE, None)
    assert (await ready(service))["prefill-8"] == DECODE
    assert service.workers("decode") == ["decode-1", "prefill-8"]


async def test_what_cannot_be_done_is_refused_with_the_reason(service: Service, connector: SupervisorConnector) -> None:
    with pytest.raises(ConnectorError, match=r"drain elsewhere-1: .* was not started by this service"):
        await connector.drain("elsewhere-1")
    with pytest.raises(ConnectorError, match=r"flip nobody-1: .* is no process of this service"):
        await connector.flip("nobody-1", DECODE)
    adding = asyncio.create_task(connector.add("decode-9", DECODE))
    async with asyncio.timeout(START_S):
        while process_of(connector, "decode-9") is None:
            await asyncio.sleep(0)
    await connector.remove("decode-9")
    with pytest.raises(ConnectorError, match=r"add decode-9: decode-9 .*before it was ready"):
        await adding
    assert process_of(connector, "decode-9") is None


async def test_a_worker_sleeps_and_wakes_and_is_used_again(service: Service, connector: SupervisorConnector) -> None:
    async def state() -> str:
        return next(w.state for w in (await service.client.status(60)).workers if w.worker_id == "decode-1")

    await asyncio.gather(connector.sleep("decode-1"), connector.sleep("decode-1"))
    async with asyncio.timeout(START_S):
        while await state() != "sleeping":
            await asyncio.sleep(0.01)
    await connector.wake("decode-1")
    assert await state() == "ready"
    with pytest.raises(ConnectorError, match="decode-9: is no process that is ready"):
        await connector.wake("decode-9")


async def test_a_worker_that_no_node_has_room_for_is_given_up_with_the_reason_and_another_one_finds_room(
    service: Service, connector: SupervisorConnector
) -> None:
    if isinstance(service.supervisor.launcher, LocalLauncher):
        pytest.skip("workers of one machine share its cores")
    names = [f"decode-{number}" for number in range(20, 20 + CPUS - len(list(connector.processes())))]
    await asyncio.gather(*(connector.add(name, DECODE) for name in names))
    assert resources_asked_for() == []
    adding = asyncio.create_task(connector.add("decode-30", DECODE))
    async with asyncio.timeout(START_S):
        while resources_asked_for() != [{"CPU": 1.0}] * (CPUS + 1):
            await asyncio.sleep(0.1)
    with pytest.raises(
        ConnectorError, match=r"decode-30: .* found no room .* within 15 s: it takes 1 CPU .* 0 CPU are"
    ):
        await adding
    assert resources_asked_for() == []
    assert process_of(connector, "decode-30") is None
    await connector.remove(names[0])
    await connector.add("decode-30", DECODE)
    assert (await ready(service))["decode-30"] == DECODE


def resources_asked_for() -> list[dict[str, float]]:
    """What Ray's autoscaler was asked for, as it reads it."""
    from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
    from ray.experimental.internal_kv import _internal_kv_get

    asked: list[dict[str, float]] = json.loads(_internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL) or "[]")
    return asked
