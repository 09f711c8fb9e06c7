"""A real NATS with workers that publish synthetic events."""

from collections.abc import AsyncIterator

import pytest

from baton.service.nats_server import NatsServer
from runtime.nats.client import NatsClient, connect
from tests.baton.events.cluster import Workers


@pytest.fixture
async def nats(nats_server: NatsServer) -> AsyncIterator[NatsClient]:
    client = await connect(nats_server.url, "test", timeout_s=60)
    yield client
    await client.close()


@pytest.fixture
async def workers(nats: NatsClient) -> AsyncIterator[Workers]:
    workers = Workers(nats)
    yield workers
    await workers.close()
