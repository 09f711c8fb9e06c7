"""What operators change about adapters, over HTTP and before workers that say what the test wants."""

from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import pytest
from starlette.applications import Starlette

from baton_proto.worker import AdapterReport
from router.api.operators.adapter_endpoints import MAX_BODY_BYTES, AdapterEndpoints
from router.api.operators.guard import OperatorsGuard
from router.views.adapters_control import AdaptersControl
from router.workers.pool import WorkerPool
from runtime.discovery.wanted_adapters import UNLOADED, changed_adapters
from runtime.errors import UnavailableError
from runtime.nats.client import NatsClient
from runtime.security.bearer_keys import bearer
from runtime.security.secret import Secret

KEY = Secret("sesame-sesame-sesame")
SQL = {"lora_name": "sql", "lora_path": "/adapters/sql"}


class Worker:
    def __init__(self, problem: str = "") -> None:
        self.problem = problem
        self.asked: list[tuple[str, str]] = []

    async def adapt(self, name: str, folder: str) -> AdapterReport:
        self.asked.append((name, folder))
        if self.problem:
            raise UnavailableError(self.problem)
        return AdapterReport((name,) if folder else (), "")


class Pool:
    model = "base"

    def __init__(self, **workers: Worker) -> None:
        self.workers = workers

    def client(self, worker_id: str) -> Worker:
        return self.workers[worker_id]

    def adapters(self) -> frozenset[str]:
        return frozenset({"sql"})


@pytest.fixture
def pool() -> Pool:
    return Pool(d0=Worker(), d1=Worker())


@pytest.fixture
async def http(pool: Pool, nats: NatsClient) -> AsyncIterator[httpx.AsyncClient]:
    control = AdaptersControl(cast(WorkerPool, pool), nats)
    endpoints = AdapterEndpoints(lambda name: control, OperatorsGuard([KEY]))
    transport = httpx.ASGITransport(Starlette(routes=endpoints.routes()))
    headers = {"authorization": bearer(KEY)}
    async with httpx.AsyncClient(transport=transport, base_url="http://router", headers=headers) as client:
        yield client


async def load(http: httpx.AsyncClient, worker: str = "", **body: Any) -> tuple[int, Any]:
    answer = await http.post(f"/v1/load_lora_adapter?worker={worker}", json=body)
    return answer.status_code, answer.json()


async def test_all_workers_change_and_later_ones_hear_of_it(
    http: httpx.AsyncClient, pool: Pool, nats: NatsClient
) -> None:
    rows = [{"worker_id": name, "adapters": ["sql"]} for name in ("d0", "d1")]
    assert await load(http, **SQL) == (200, {"workers": rows})
    assert await changed_adapters(nats) == {"sql": "/adapters/sql"}
    unloaded = await http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert unloaded.status_code == 200
    assert await changed_adapters(nats) == {"sql": UNLOADED}
    assert pool.workers["d1"].asked == [("sql", "/adapters/sql"), ("sql", UNLOADED)]


async def test_one_worker_alone_changes_and_no_other_later(
    http: httpx.AsyncClient, pool: Pool, nats: NatsClient
) -> None:
    assert (await load(http, "d1", **SQL))[0] == 200
    assert pool.workers["d0"].asked == []
    assert await changed_adapters(nats) == {}


async def test_a_worker_that_cannot_is_named_and_what_nobody_can_is_not_kept(
    http: httpx.AsyncClient, pool: Pool, nats: NatsClient
) -> None:
    pool.workers["d0"].problem = "it has no room"
    status, told = await load(http, **SQL)
    assert (status, told["workers"][0]) == (503, {"worker_id": "d0", "problem": "it has no room"})
    assert await changed_adapters(nats) == {"sql": "/adapters/sql"}
    pool.workers["d1"].problem = "nor has it"
    assert (await load(http, lora_name="poem", lora_path="/adapters/poem"))[0] == 503
    assert "poem" not in await changed_adapters(nats)


async def test_what_makes_no_sense_asks_nobody(http: httpx.AsyncClient, pool: Pool) -> None:
    for body, problem in (
        ({"lora_name": "base", "lora_path": "/a"}, "which is the model's"),
        ({"lora_name": "a b", "lora_path": "/a"}, "a name of up to 128 letters"),
        ({"lora_name": "sql", "lora_path": ""}, "is empty"),
        ({"lora_name": "sql"}, "lora_path"),
        (SQL | {"load_inplace": True}, "load_inplace"),
        (SQL | {"lora_path": "x" * MAX_BODY_BYTES}, "is larger than"),
    ):
        status, told = await load(http, **body)
        assert 400 <= status < 500, told
        assert problem in told["error"]["message"]
    unknown = await http.post("/v1/unload_lora_adapter", json={"lora_name": "essay"})
    assert (unknown.status_code, "served: sql" in unknown.text) == (404, True)
    http.headers["authorization"] = "Bearer wrong-wrong-wrong"
    assert (await load(http, **SQL))[0] == 401
    assert pool.workers["d0"].asked == []
