"""A decode worker and two prefill workers (shared memory, TCP) as processes, started once for all tests here."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from baton.service.local.nats_server import NatsServer
from runtime.config.serving import EngineConfig, ServingConfig, TransferConfig, WorkersConfig
from runtime.config.surroundings import NatsConfig
from tests.worker.worker_process import WorkerProcess, start_worker, stop


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def nats_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    server = NatsServer(store_dir=tmp_path_factory.mktemp("nats"))
    await server.start()
    yield server.url
    await server.stop()


@pytest.fixture(scope="session")
def config(tiny_model: Path, nats_url: str) -> ServingConfig:
    """Small chunks: a long prompt takes many steps, so that a test can step in between."""
    return ServingConfig(
        model=str(tiny_model),
        namespace="workers-test",
        nats=NatsConfig(url=nats_url),
        workers=WorkersConfig(drain_timeout_s=10.0),
        engine=EngineConfig(kv_memory="8MiB", max_batch_tokens=64, threads=1),
        transfer=TransferConfig(checksum=True),
    )


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workers")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def decode(config: ServingConfig, folder: Path) -> AsyncIterator[WorkerProcess]:
    worker = await start_worker("decode", "decode-0", config, folder)
    yield worker
    stop(worker)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def prefill_shm(config: ServingConfig, folder: Path) -> AsyncIterator[WorkerProcess]:
    worker = await start_worker("prefill", "prefill-shm", config, folder)
    yield worker
    stop(worker)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def prefill_tcp(config: ServingConfig, folder: Path) -> AsyncIterator[WorkerProcess]:
    over_tcp = msgspec.structs.replace(config, transfer=TransferConfig(transport="tcp", checksum=True))
    worker = await start_worker("prefill", "prefill-tcp", over_tcp, folder)
    yield worker
    stop(worker)


@pytest.fixture
def mortal() -> Iterator[list[WorkerProcess]]:
    """Workers that a test starts and may kill; what is left of them is killed at its end."""
    workers: list[WorkerProcess] = []
    yield workers
    for worker in workers:
        stop(worker)
