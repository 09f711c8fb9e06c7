"""A request whose first token would come too late is refused at once, over both APIs, with the time to come back."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import httpx
import pytest

from baton_proto.generated import inference_pb2 as pb
from tests.service import Service, running_service

LONG = "a" * 20_000  # one token a character: more than half a second of a mock worker


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with running_service("mock", 0, 1, mock={"answer_tokens": 2}) as running:
        yield running


def request(text: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text)


async def test_a_request_that_would_miss_its_deadline_is_refused_at_once(service: Service) -> None:
    busy = [asyncio.create_task(service.client.generate(request(f"{i}{LONG}"))) for i in range(8)]
    async with httpx.AsyncClient(base_url=service.http_url, timeout=60) as http:
        await until_queued(service, 8)
        await over_http(http)
        await over_grpc(service)
        in_time = await http.post("/v1/completions", json={"prompt": "x"}, headers={"x-baton-deadline-ms": "60000"})
        assert in_time.status_code == 200
        metrics = (await http.get("/metrics")).text
        assert 'baton_router_refusals_total{reason="too_late"} 5.0' in metrics
    explained = await service.client.explain(pb.ExplainRequest(request_id="late"))
    (decision,) = explained.decisions
    assert decision.reason == pb.PLACEMENT_REASON_TOO_LATE
    assert decision.expected_ms > 500
    assert len(decision.candidates) == 1
    for task in busy:
        await task


async def over_http(http: httpx.AsyncClient) -> None:
    for stream in (False, True):
        late = await http.post(
            "/v1/completions",
            json={"prompt": LONG, "stream": stream},
            headers={"x-baton-deadline-ms": "50", "x-request-id": "late" if stream else "other"},
        )
        assert late.status_code == 429
        assert int(late.headers["retry-after"]) >= 1
        assert late.json()["error"]["code"] == "too_late"
        assert "the first token is expected in" in late.json()["error"]["message"]
    late = await http.post("/v1/completions", json={"prompt": LONG}, headers={"x-request-timeout-s": "0.2"})
    assert late.status_code == 429, "the whole answer cannot come in time either"
    for text in ("soon", "-1", "nan"):
        bad = await http.post("/v1/completions", json={"prompt": "x"}, headers={"x-baton-deadline-ms": text})
        assert bad.status_code == 400
        assert "x-baton-deadline-ms" in bad.json()["error"]["message"]


async def over_grpc(service: Service) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await service.client.generate(request(LONG), 0.3)
    assert late.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert int(dict(late.value.trailing_metadata() or ())["retry-after-ms"]) >= 1
    async with grpc.aio.insecure_channel(service.grpc_address) as channel:
        call = channel.unary_stream(
            "/baton.v1.Inference/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )(request(LONG), metadata=(("baton-deadline-ms", "50"),))
        with pytest.raises(grpc.aio.AioRpcError) as late:
            [answer async for answer in call]
        assert late.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_router_may_refuse_whatever_would_come_late() -> None:
    options = {"router": {"reject_ttft_ms": 300}, "mock": {"answer_tokens": 2}}
    async with running_service("mock", 0, 1, **options) as service:
        answers = await asyncio.gather(
            *(service.client.generate(request(f"{i}{LONG[:5000]}")) for i in range(20)), return_exceptions=True
        )
        refused = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
        assert 0 < len(refused) < 20
        assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}


async def test_a_tight_deadline_is_met_behind_a_long_prompt_that_has_none() -> None:
    book = "b" * 30_000  # more than a second
    async with running_service("mock", 0, 1, mock={"answer_tokens": 2}) as service:
        await service.client.generate(request("warm" * 200))  # now the engine knows how long its steps take
        books = [asyncio.create_task(service.client.generate(request(f"{i}{book}"))) for i in range(8)]
        async with httpx.AsyncClient(base_url=service.http_url, timeout=60) as http:
            await until_queued(service, 8)
            begin_s = asyncio.get_running_loop().time()
            tight = await http.post(
                "/v1/completions",
                json={"prompt": "t" * 14_000, "max_tokens": 1},  # too long to slip in
                headers={"x-baton-deadline-ms": "6000"},
            )
            took_s = asyncio.get_running_loop().time() - begin_s
        assert tight.status_code == 200, tight.text
        assert took_s < 6.0
        assert not books[-1].done()
        await asyncio.gather(*books)


async def until_queued(service: Service, count: int) -> None:
    async with asyncio.timeout(45):
        while (await service.client.status(60)).queue.running < count:
            await asyncio.sleep(0.01)
