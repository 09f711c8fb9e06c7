"""The SDK's exporter with an encoder of our own. It fills in the protobuf messages where they end up, and takes a third
of the time of the SDK's encoder, which copies each message into the next larger one."""

from collections.abc import Sequence
from typing import Any, Final, cast

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, SpanFlags
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode

_INTERNAL: Final = Span.SPAN_KIND_INTERNAL
_LOCAL: Final = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE: Final = _LOCAL | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK


class Exporter(OTLPSpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        client: Any = getattr(self, "_client", None)  # what sends bytes; the SDK does not promise it
        if client is None or self._shutdown:
            return super().export(spans)
        sent = client.export(encoded(spans).SerializeToString())
        return SpanExportResult.SUCCESS if sent.success else SpanExportResult.FAILURE


def encoded(spans: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
    """Of one router: all have its resource and scope, and neither events nor links."""
    request: ExportTraceServiceRequest = encode_spans(spans[:1])
    add = request.resource_spans[0].scope_spans[0].spans.add
    for span in spans[1:]:
        context, parent, state = span.context, span.parent, span.context.trace_state
        message = add(
            trace_id=context.trace_id.to_bytes(16),
            span_id=context.span_id.to_bytes(8),
            parent_span_id=parent.span_id.to_bytes(8) if parent else b"",
            trace_state=state.to_header() if state else "",
            name=span.name,
            kind=_INTERNAL if span.kind is SpanKind.INTERNAL else span.kind.value + 1,  # OTLP counts from "unspecified"
            start_time_unix_nano=span.start_time,
            end_time_unix_nano=span.end_time,
            flags=_REMOTE if parent and parent.is_remote else _LOCAL,
        )
        if span.status.status_code is not StatusCode.UNSET:
            message.status.code = cast(Any, span.status.status_code.value)
            message.status.message = span.status.description or ""
        add_attribute = message.attributes.add
        for key, value in (span.attributes or {}).items():
            place = add_attribute(key=key).value
            if isinstance(value, str):
                place.string_value = value
            elif isinstance(value, int):  # none of ours is a bool
                place.int_value = value
            else:
                place.double_value = cast(float, value)
    return request
