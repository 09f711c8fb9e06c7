"""A real NATS with workers that publish synthetic events."""

from collections.abc import AsyncIterator

import pytest

from runtime.nats.client import NatsClient
from tests.baton.events.cluster import Workers


@pytest.fixture
async def workers(nats: NatsClient) -> AsyncIterator[Workers]:
    workers = Workers(nats)
    yield workers
    await workers.close()
