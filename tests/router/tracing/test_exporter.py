"""How spans are encoded."""

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs pip install 'baton-serve[otel]'")

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import ReadableSpan

from router.tracing.exporter import encoded
from router.tracing.sdk import Sdk
from runtime.config.serving import TracesConfig
from tests.router.tracing.test_sdk import YES


def described(request: ExportTraceServiceRequest) -> list[Span]:
    """The spans in an order of their own, without what says nothing: the SDK writes a status that is unset."""
    spans = [span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans]
    for span in spans:
        if not span.status.code:
            span.ClearField("status")
    return sorted(spans, key=lambda span: span.span_id)


def test_spans_are_encoded_as_the_sdk_encodes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = Sdk(TracesConfig(enabled=True, sample=1.0), "router-1")
    ended: list[ReadableSpan] = []
    monkeypatch.setattr(sdk._exporting, "on_end", ended.append)
    try:
        for carrier in ({}, YES, YES | {"tracestate": "a=1,b=2"}):
            call = sdk.start("POST", carrier, {"http.route": "/v1/completions"}, 1_700_000_000_000_000_000)
            request = sdk.child(call.get_span_context(), "generate", {"tokens": 7, "gb_per_s": 1.5}, 1, 2, "")
            sdk.child(request, "attempt", {"worker": "decode-1"}, 1, 2, "it was lost")
            call.set_attributes({"http.response.status_code": 503})
            sdk.fail(call, "status 503")
            call.end(1_700_000_000_000_000_009)
    finally:
        sdk.shutdown()
    ours, theirs = encoded(ended), encode_spans(ended)
    assert len(described(ours)) == len(ended) == 9
    assert described(ours) == described(theirs)
    assert ours.resource_spans[0].resource == theirs.resource_spans[0].resource
