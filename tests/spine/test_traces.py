"""Traces of a real service, as a collector gets them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
import pytest_asyncio

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs pip install 'baton-serve[otel]'")

from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from baton_proto.generated import inference_pb2_grpc as pb_grpc
from tests.router.tracing.collector import Collector, collecting
from tests.service import Service, running_service
from tests.spine.busy import killed_while_busy
from tests.spine.prompts import greedy, random_prompt

PARENT = "00f067aa0ba902b7"
SHIP_ALL = {"placement": {"local_prefill_tokens": 0}, "no_worker_timeout_s": 2.0}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traced(tiny_model: Path) -> AsyncIterator[tuple[Service, Collector]]:
    with collecting() as collector, pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # ms until spans are sent, instead of 5 s
        environment.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
        environment.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
        async with running_service(tiny_model, 2, 1, router=SHIP_ALL, engine={"max_batch_tokens": 16}) as service:
            yield service, collector


def facts(span: Span) -> dict[str, Any]:
    return {fact.key: getattr(fact.value, fact.value.WhichOneof("value") or "int_value") for fact in span.attributes}


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


async def complete(service: Service, trace_id: str, num_tokens: int, flags: str = "01") -> None:
    body = {"prompt": random_prompt(num_tokens, seed=num_tokens), "max_tokens": 8, "ignore_eos": True}
    headers = {"traceparent": f"00-{trace_id}-{PARENT}-{flags}"}
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(f"{service.http_url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_is_one_tree_below_its_callers_span(traced: tuple[Service, Collector]) -> None:
    service, collector = traced
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    await complete(service, trace_id, 200)
    spans = await asyncio.to_thread(collector.trace, trace_id)
    by_id = {span.span_id: span for span in spans}
    (call,) = named(spans, "POST /v1/completions")
    assert call.parent_span_id.hex() == PARENT
    assert facts(call)["http.response.status_code"] == 200
    above = {span.name: by_id[span.parent_span_id].name for span in spans if span is not call}
    assert above == {
        "generate": "POST /v1/completions",
        "attempt": "generate",
        **dict.fromkeys(("queue", "placement", "reservation", "prefill", "first step", "decode"), "attempt"),
        **dict.fromkeys(("prefill queue", "prefill chunk", "KV push"), "prefill"),
    }
    for span in spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        if span is not call:
            parent = by_id[span.parent_span_id]
            assert parent.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= parent.end_time_unix_nano
    (generate,) = named(spans, "generate")
    asked = facts(generate)
    assert (asked["gen_ai.usage.input_tokens"], asked["gen_ai.usage.output_tokens"]) == (200, 8)
    chunks, pushes = named(spans, "prefill chunk"), named(spans, "KV push")
    assert len(chunks) >= 3
    assert sum(facts(chunk)["baton.tokens"] for chunk in chunks) == 200
    (decode,) = named(spans, "decode")
    assert (facts(decode)["baton.tokens"], facts(decode)["baton.worker"]) == (8, "decode-1")
    assert all(facts(push)["baton.kv.layers"] == facts(pushes[0])["baton.kv.layers"] for push in pushes)
    assert all(facts(push)["baton.kv.gb_per_s"] > 0 and facts(push)["baton.kv.transport"] == "shm" for push in pushes)
    order = [
        named(spans, name)[0]
        for name in ("queue", "placement", "reservation", "prefill chunk", "KV push", "first step", "decode")
    ]
    assert order == sorted(order, key=lambda span: span.start_time_unix_nano)
    assert collector.services == {"baton"}


@pytest.mark.asyncio(loop_scope="module")
async def test_neither_a_caller_who_says_no_nor_a_share_of_0_makes_a_trace(
    traced: tuple[Service, Collector],
) -> None:
    service, collector = traced
    unwanted, wanted = "11" * 16, "22" * 16
    await complete(service, unwanted, 40, flags="00")
    async with httpx.AsyncClient(timeout=60) as http:
        await http.post(f"{service.http_url}/v1/completions", json={"prompt": "by itself", "max_tokens": 2})
    await complete(service, wanted, 41)
    await asyncio.to_thread(collector.trace, wanted)
    assert {span.trace_id.hex() for span in collector.spans} <= {wanted, "4bf92f3577b34da6a3ce929d0e0e4736"}


@pytest.mark.asyncio(loop_scope="module")
async def test_a_replayed_request_shows_both_attempts(traced: tuple[Service, Collector]) -> None:
    service, collector = traced
    first_id = 0x33 << 120
    lost, asked = await killed_while_busy(
        service,
        service.workers("prefill"),
        lambda number: complete(service, f"{first_id + number:032x}", 4000 - number),
        callers=2,
        prompt_tokens=2500,
    )
    traces = [await asyncio.to_thread(collector.trace, f"{first_id + number:032x}") for number in asked]
    spans = next(trace for trace in traces if len(named(trace, "attempt")) > 1)
    first, second = named(spans, "attempt")
    assert (facts(first)["baton.attempt"], facts(second)["baton.attempt"]) == (1, 2)
    assert first.status.code == Status.STATUS_CODE_ERROR
    assert lost in first.status.message
    assert second.status.code != Status.STATUS_CODE_ERROR
    (decode,) = named(spans, "decode")
    assert decode.parent_span_id == second.span_id
    assert {facts(span)["baton.worker"] for span in named(spans, "prefill")} == {"prefill-1", "prefill-2"}


@pytest.mark.asyncio(loop_scope="module")
async def test_a_grpc_request_goes_on_in_its_callers_trace(traced: tuple[Service, Collector]) -> None:
    service, collector = traced
    trace_id = "44" * 16
    parent = (("traceparent", f"00-{trace_id}-{PARENT}-01"),)
    request = greedy(random_prompt(50, seed=50), 3)
    async with grpc.aio.insecure_channel(service.grpc_address) as channel:
        pieces = [piece async for piece in pb_grpc.InferenceStub(channel).Generate(request, metadata=parent)]
    assert pieces
    spans = await asyncio.to_thread(collector.trace, trace_id)
    (call,), (generate,) = named(spans, "baton.v1.Inference/Generate"), named(spans, "generate")
    assert call.parent_span_id.hex() == PARENT
    assert generate.parent_span_id == call.span_id
    asked = facts(call)
    assert (asked["rpc.system"], asked["rpc.service"], asked["rpc.method"]) == (
        "grpc",
        "baton.v1.Inference",
        "Generate",
    )
    assert asked["rpc.grpc.status_code"] == 0
    assert facts(generate)["gen_ai.usage.output_tokens"] == 3
