"""A stand-in for an OpenTelemetry collector: an HTTP server that reads OTLP with the official messages."""

import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

TIMEOUT_S = 30.0


class Collector:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()
        self._news = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    data = gzip.decompress(data)
                collector._take(ExportTraceServiceRequest.FromString(data))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}/v1/traces"

    def _take(self, request: ExportTraceServiceRequest) -> None:
        with self._news:
            for resource in request.resource_spans:
                facts = {fact.key: fact.value.string_value for fact in resource.resource.attributes}
                self.services.add(facts["service.name"])
                for scope in resource.scope_spans:
                    self.spans += scope.spans
            self._news.notify_all()

    def trace(self, trace_id: str) -> list[Span]:
        """The spans of a trace, once its call's span has come, which is the last one. By their begin."""
        end_s = time.monotonic() + TIMEOUT_S
        with self._news:
            while True:
                spans = [span for span in self.spans if span.trace_id.hex() == trace_id]
                if any(span.kind == Span.SPAN_KIND_SERVER for span in spans):
                    return sorted(spans, key=lambda span: span.start_time_unix_nano)
                assert self._news.wait(end_s - time.monotonic()), f"no trace {trace_id} came"


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector to which this process, and those that it starts meanwhile, send their spans."""
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever, daemon=True)
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector.endpoint)
            yield collector
    finally:
        collector.server.shutdown()
        collector.server.server_close()
        thread.join()
