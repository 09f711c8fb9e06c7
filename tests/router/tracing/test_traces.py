"""Which calls get a trace, and what is said of them."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs pip install 'baton-serve[otel]'")

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from baton_proto.generated import inference_pb2 as pb, inference_pb2_grpc as pb_grpc
from router.api.http.server import serve_http
from router.api.responses.store import ResponseStore
from router.api.serving.app import create_app
from router.api.serving.grpc_api import GrpcApi
from router.counters.metrics import RouterMetrics
from router.counters.tally import RequestTally
from router.requests.request import Finished, GenerateRequest, Piece
from router.tracing.grpc_calls import TraceCalls
from router.tracing.traces import Traces, over_http
from runtime.security.bearer_keys import BearerKeys
from runtime.security.secret import Secret
from tests.router.api.serving.test_grpc_api import status
from tests.router.http_client import CHAT, COMPLETION, USER
from tests.router.operator_questions import make_questions
from tests.router.scripted_generator import MODEL, ScriptedGenerator, make_frontend, tiny_tokenizer
from tests.router.tracing.collector import Collector, collecting

KEY = "k" * 32
SAMPLED = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
BEARER = {"authorization": f"Bearer {KEY}"}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"model": MODEL, "input": "Who?", "store": True},
    "/v1/messages": {"model": MODEL, "messages": USER, "max_tokens": 9},
}
OPERATIONS = {f"POST {path}": "text_completion" if path == "/v1/completions" else "chat" for path in ASKED}


class CountedGenerator(ScriptedGenerator):
    """Tells the router's counters of its requests, as the real one does."""

    def __init__(self, folder: Path) -> None:
        super().__init__(tiny_tokenizer(folder))
        self.metrics = RouterMetrics()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Piece | Finished, None]:
        with RequestTally(self.metrics, request.request_id, len(request.prompt)):
            async for item in super().generate(request):
                yield item


@asynccontextmanager
async def traced(folder: Path, collector: Collector) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """A client of HTTP, and the address of gRPC. All spans have come when it ends."""
    generator = CountedGenerator(folder)
    frontend, keys = make_frontend(generator), BearerKeys.plain([Secret(KEY)])
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
        environment.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
        traces = Traces("router-1", {MODEL: generator.metrics.recent})
    store = ResponseStore(1 << 20, 60.0)
    app = create_app(frontend, lambda: b"", keys=keys, around=partial(over_http, traces), store=store)
    api = GrpcApi(frontend, make_questions(status), keys, innermost=[TraceCalls(traces)])
    async with AsyncExitStack() as closing:
        closing.push_async_callback(traces.close)
        port = await api.start("127.0.0.1", 0)
        closing.push_async_callback(api.stop)
        server = await closing.enter_async_context(await serve_http(app, "127.0.0.1", 0))
        address = f"http://127.0.0.1:{server.port}"
        http = await closing.enter_async_context(httpx.AsyncClient(base_url=address, headers=SAMPLED, timeout=60))
        yield http, f"127.0.0.1:{port}"


def fact(span: Span, key: str) -> str:
    (value,) = (one.value.string_value for one in span.attributes if one.key == key)
    return value


def operations(spans: list[Span]) -> dict[str, str]:
    """Of the request below each call, by the call's name."""
    calls = {span.span_id: span.name for span in spans if span.kind == Span.SPAN_KIND_SERVER}
    requests = [span for span in spans if span.name == "generate"]
    return {calls[span.parent_span_id]: fact(span, "gen_ai.operation.name") for span in requests}


async def test_only_requests_for_text_that_show_a_key_get_a_trace(tiny_model: Path) -> None:
    with collecting() as collector:
        async with traced(tiny_model, collector) as (http, grpc_address):
            for path, body in ASKED.items():
                assert (await http.post(path, json=body)).status_code == 401
                assert (await http.post(path, json=body, headers=BEARER)).status_code == 200
            for path in ("/v1/x", "/v1/responses/resp_1/cancel", "/v1/messages/count_tokens", "/v1/completions/"):
                for shown in ({}, BEARER):
                    await http.post(path, json=ASKED["/v1/messages"], headers=shown)
            assert (await http.get("/v1/completions", headers=BEARER)).status_code == 405
            async with grpc.aio.insecure_channel(grpc_address) as channel:
                call = pb_grpc.InferenceStub(channel).Generate(
                    pb.GenerateRequest(text="Who?"), metadata=[*SAMPLED.items()]
                )
                with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                    await call.read()
    calls = [span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]
    assert sorted(span.name for span in calls) == sorted(OPERATIONS)
    assert {f"POST {fact(span, 'http.route')}" for span in calls} == OPERATIONS.keys()


async def test_a_request_is_named_by_what_was_asked_for(tiny_model: Path) -> None:
    with collecting() as collector:
        async with traced(tiny_model, collector) as (http, _):
            for path, body in ASKED.items():
                await http.post(path, json=body, headers=BEARER)
        assert operations(collector.spans) == OPERATIONS


@pytest.mark.parametrize("operation", ["chat", "text_completion"])
async def test_a_grpc_request_is_named_by_its_input(tiny_model: Path, operation: str) -> None:
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="Who?")])
    request = pb.GenerateRequest(chat=chat) if operation == "chat" else pb.GenerateRequest(text="Who?")
    with collecting() as collector:
        async with traced(tiny_model, collector) as (_, address), grpc.aio.insecure_channel(address) as channel:
            metadata = [*SAMPLED.items(), *BEARER.items()]
            pieces = pb_grpc.InferenceStub(channel).Generate(request, metadata=metadata)
            assert [piece async for piece in pieces]
        assert operations(collector.spans) == {"baton.v1.Inference/Generate": operation}
