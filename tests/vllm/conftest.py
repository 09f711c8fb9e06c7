"""Every test here starts a real engine: it takes a minute, and room for one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.service.nats_server import NatsServer
from runtime.nats.client import NatsClient, connect
from tests.vllm.environment import needed_python


@pytest.fixture
def vllm_python() -> Path:
    return needed_python()


@pytest.fixture
async def nats(nats_server: NatsServer) -> AsyncIterator[NatsClient]:
    client = await connect(nats_server.url, "test", timeout_s=60)
    yield client
    await client.close()
