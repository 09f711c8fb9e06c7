"""What the line of an API key allows, over both APIs."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from baton_proto.generated import inference_pb2 as pb, inference_pb2_grpc as pb_grpc
from router.api.http.server import serve_http
from router.api.serving.app import create_app
from router.api.serving.grpc_api import GrpcApi
from router.requests.frontend import Frontend
from runtime.security.bearer_keys import BearerKeys
from runtime.security.callers import key_name, parse_callers
from runtime.security.failed_logins import FailedLogins
from runtime.security.secret import Secret
from tests.router.http_client import COMPLETION
from tests.router.operator_questions import make_questions
from tests.router.scripted_generator import ScriptedGenerator, make_frontend, tiny_tokenizer

LINES = """
acme tenant=acme max_priority=5
gateway tenant=*
plain
few tenant=few requests_per_minute=2
"""


@pytest.fixture
def generator(tiny_model: Path) -> ScriptedGenerator:
    return ScriptedGenerator(tiny_tokenizer(tiny_model))


@pytest.fixture
def frontend(generator: ScriptedGenerator) -> Frontend:
    return make_frontend(generator)


@pytest.fixture
def logins() -> FailedLogins:
    return FailedLogins()


@pytest.fixture
async def http(frontend: Frontend, logins: FailedLogins) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(frontend, lambda: b"", keys=BearerKeys(parse_callers(LINES, "test")), logins=logins)
    async with (
        await serve_http(app, "127.0.0.1", 0) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client,
    ):
        yield client


@pytest.fixture
async def stub(frontend: Frontend, logins: FailedLogins) -> AsyncIterator[pb_grpc.InferenceStub]:
    api = GrpcApi(frontend, make_questions(), BearerKeys(parse_callers(LINES, "test")), logins=logins)
    await api.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{api.port}") as channel:
        yield pb_grpc.InferenceStub(channel)
    await api.stop()


async def post(http: httpx.AsyncClient, key: str, tenant: str | None = None, **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} | ({} if tenant is None else {"x-baton-tenant": tenant})
    return await http.post("/v1/completions", json=COMPLETION | fields, headers=headers)


async def call(stub: pb_grpc.InferenceStub, key: str, tenant: str | None = None, **fields: Any) -> None:
    metadata = [("authorization", f"Bearer {key}"), *([] if tenant is None else [("baton-tenant", tenant)])]
    async for _ in stub.Generate(pb.GenerateRequest(text="a", **fields), metadata=metadata, timeout=60):
        pass


async def test_a_tenant_is_what_the_keys_line_says_whatever_the_request_says(
    http: httpx.AsyncClient, stub: pb_grpc.InferenceStub, generator: ScriptedGenerator
) -> None:
    for key in ("acme", "gateway", "plain"):
        for tenant in (None, "mine"):
            assert (await post(http, key, tenant)).status_code == 200
            await call(stub, key, tenant)
    tenants = [request.tenant for request in generator.requests]
    own = tenants[-1]
    assert tenants == ["acme"] * 4 + ["", "", "mine", "mine"] + [own] * 4
    assert own not in ("", "mine", "acme")


async def test_a_wrong_key_is_counted_and_a_request_says_whose_key_it_has_shown(
    http: httpx.AsyncClient, stub: pb_grpc.InferenceStub, logins: FailedLogins, generator: ScriptedGenerator
) -> None:
    for key in ("acme", "wrong"):
        await post(http, key)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call(stub, key)
    assert +logins.counts == {("http", "API key"): 1, ("grpc", "API key"): 1}
    accounts = [request.account for request in generator.requests]
    assert [account and account.key for account in accounts] == [key_name(Secret("acme"))] * 2


async def test_a_tenant_that_no_header_could_hold_is_refused(
    http: httpx.AsyncClient, stub: pb_grpc.InferenceStub
) -> None:
    for bad in ("a b", "x" * 129):
        answer = await post(http, "gateway", bad)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-baton-tenant")
        with pytest.raises(grpc.aio.AioRpcError, match="baton-tenant: must be 1 to 128 visible"):
            await call(stub, "gateway", bad)


@pytest.mark.parametrize(("key", "highest"), [("acme", 5), ("plain", 0)])
async def test_a_priority_is_bounded_by_the_keys_line_and_else_by_the_configuration(
    http: httpx.AsyncClient, stub: pb_grpc.InferenceStub, generator: ScriptedGenerator, key: str, highest: int
) -> None:
    for taken in (highest, -7):
        assert (await post(http, key, priority=taken)).status_code == 200
        await call(stub, key, priority=taken)
    assert [request.priority for request in generator.requests] == [highest, highest, -7, -7]
    refused = f"priority: is {highest + 1}, must be at most {highest}; router.max_priority, and max_priority= "
    answer = await post(http, key, priority=highest + 1)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(refused)
    with pytest.raises(grpc.aio.AioRpcError, match=refused) as caught:
        await call(stub, key, priority=highest + 1)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_limit_that_is_reached_says_when_to_come_back(
    http: httpx.AsyncClient, stub: pb_grpc.InferenceStub, generator: ScriptedGenerator
) -> None:
    assert (await post(http, "few")).status_code == 200
    await call(stub, "few")  # both APIs count together
    answer = await post(http, "few")
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "limit of 2 requests per minute" in answer.json()["error"]["message"]
    assert 1 <= int(answer.headers["retry-after"]) <= 30
    with pytest.raises(grpc.aio.AioRpcError, match="limit of 2 requests per minute") as caught:
        await call(stub, "few")
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailing = dict(caught.value.trailing_metadata() or ())
    assert 1 <= int(trailing["retry-after-ms"]) <= 30_000
    assert (await post(http, "plain")).status_code == 200
    assert len(generator.requests) == 3


async def test_without_keys_all_are_one_tenant_of_bounded_priority(
    frontend: Frontend, generator: ScriptedGenerator
) -> None:
    app = create_app(frontend, lambda: b"")
    async with (
        await serve_http(app, "127.0.0.1", 0) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as http,
    ):
        for tenant in ("a", "b"):
            assert (await post(http, "none", tenant)).status_code == 200
        assert (await post(http, "none", priority=2**31 - 1)).status_code == 400
    assert [request.tenant for request in generator.requests] == ["", ""]
