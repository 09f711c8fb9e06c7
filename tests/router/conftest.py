"""What the tests of the router share."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from baton.service.local.nats_server import NatsServer
from router.text.tokenizer import Tokenizer
from runtime.nats.client import connect
from tests.router.indexed_cluster import Cluster
from tests.tiny_model import VOCAB_SIZE


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model, VOCAB_SIZE)


@pytest.fixture
async def cluster(nats_server: NatsServer) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as closing:
        router_nats = await connect(nats_server.url, "router", timeout_s=60)
        closing.push_async_callback(router_nats.close)
        worker_nats = await connect(nats_server.url, "workers", timeout_s=60)
        closing.push_async_callback(worker_nats.close)
        cluster = Cluster(nats_server, router_nats, worker_nats)
        await cluster.indexer.start()
        await router_nats.flush()  # the server knows of the subscriptions: what is said once is not missed
        yield cluster
        await cluster.indexer.close()
        for worker in cluster.workers.values():
            await worker.publisher.close()
