"""A whole service as processes: they come up together, their deaths are reported, none is left behind."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from baton.service.local.child_process import ChildProcess
from baton.service.supervisor import Supervisor
from baton_proto.generated import inference_pb2 as pb
from runtime.calls.router import Client
from runtime.config.overrides import with_overrides
from runtime.config.serving import ServingConfig
from runtime.processes.process import ProcessFailedError, Ready
from tests.service import TEST_DEFAULTS, Service, assert_gone, running_service

WAIT_S = 60.0
ALONE = {"per_process": 1}  # each simulated worker in a process of its own, as others are


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def service() -> AsyncIterator[Service]:
    """Its processes start as users have them, not forked as elsewhere in tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baton.service.local.build_process.ChildProcess", ChildProcess)
        async with running_service("mock", prefill=1, decode=1, workers=ALONE) as service:
            yield service


def request_of(num_tokens: int, max_tokens: int) -> pb.GenerateRequest:
    sampling = pb.SamplingOptions(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(tokens=pb.TokenIds(ids=[3 + i % 200 for i in range(num_tokens)]), sampling=sampling)


def config_for(model: Path | str, **sections: object) -> ServingConfig:
    return with_overrides(with_overrides(ServingConfig(model=str(model)), TEST_DEFAULTS), sections)


class TestARunningService:
    """These share one service; what they start, they stop."""

    pytestmark = pytest.mark.asyncio(loop_scope="module")

    async def test_it_answers(self, service: Service) -> None:
        answer = await service.client.generate(request_of(100, 4), timeout_s=WAIT_S)
        assert len(answer.token_ids) == 4
        assert answer.served_by[0].decode_worker == "decode-1"

    async def test_every_process_is_a_child_of_its_own(self, service: Service) -> None:
        commands = {name: psutil.Process(service.pid(name)).cmdline() for name in service.supervisor.children}
        assert set(commands) == {"router-1", "prefill-1", "decode-1"}
        for name, module in (("router-1", "router"), ("prefill-1", "prefill_worker"), ("decode-1", "decode_worker")):
            assert module in commands[name]
        assert service.nats.alive

    async def test_a_worker_can_be_added_and_drained(self, service: Service) -> None:
        worker_id = await service.start_worker("decode")
        assert service.workers("decode") == ["decode-1", worker_id]
        await until_known(service.client, worker_id, True)
        assert await service.stop_worker(worker_id)
        assert service.workers("decode") == ["decode-1"]
        await until_known(service.client, worker_id, False)

    async def test_an_unexpected_death_is_reported_and_nothing_restarted(self, service: Service) -> None:
        worker_id = await service.start_worker("prefill")
        service.kill(worker_id)
        ended = await asyncio.wait_for(service.supervisor.wait(), WAIT_S)
        assert (ended.name, ended.returncode) == (worker_id, -signal.SIGKILL)
        assert service.workers("prefill") == ["prefill-1"]

    async def test_a_drain_is_not_reported_as_a_death(self, service: Service) -> None:
        await service.stop_worker(await service.start_worker("prefill"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(service.supervisor.wait(), 0.2)

    async def test_each_worker_gets_its_share_of_the_cores(self, service: Service) -> None:
        variables = psutil.Process(service.pid("decode-1")).environ()
        assert variables["OMP_NUM_THREADS"] == "1"


async def test_requests_in_flight_end_before_the_processes_do() -> None:
    async with running_service("mock", workers=ALONE) as service:
        request = asyncio.create_task(service.client.generate(request_of(1000, 200), timeout_s=60))
        await until_busy(service.client)
        clean = await service.supervisor.stop()
        assert clean
        assert len((await request).token_ids) == 200


async def test_a_service_whose_worker_cannot_start_fails_and_leaves_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    supervisor = Supervisor(config_for(broken), log_dir=tmp_path / "logs")
    with pytest.raises(ProcessFailedError, match="before it was ready"):
        await supervisor.start()
    assert not supervisor.nats
    assert_gone(child.pid for child in supervisor.children.values())


async def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    ready: list[Ready] = []
    supervisor = Supervisor(config_for("mock", workers=ALONE), log_dir=tmp_path, on_ready=ready.append)
    starting = asyncio.create_task(supervisor.start())
    while sum(child.alive for child in supervisor.children.values()) < 3:
        await asyncio.sleep(0.01)
    pids = [child.pid for child in supervisor.children.values()] + [ready[0].pid]
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert_gone(pids)


async def test_a_dead_nats_server_is_reported(tmp_path: Path) -> None:
    config = config_for("mock", workers={"prefill": 0, "decode": 0})
    async with Supervisor(config, log_dir=tmp_path) as supervisor:
        psutil.Process(supervisor.nats["nats"].pid).kill()
        ended = await asyncio.wait_for(supervisor.wait(), WAIT_S)
        assert ended.name == "nats"


async def until_known(client: Client, worker_id: str, known: bool) -> None:
    """Waits until the router lists the worker as ready, or no longer."""
    async with asyncio.timeout(WAIT_S):
        while (worker_id in {w.worker_id for w in (await client.status()).workers if w.state == "ready"}) != known:
            await asyncio.sleep(0.02)


async def until_busy(client: Client) -> None:
    async with asyncio.timeout(WAIT_S):
        while not (await client.status()).queue.running:
            await asyncio.sleep(0.01)
