"""The parts of OpenTelemetry's SDK that are used here. They are imported when the environment asks for traces."""

import contextlib
import os
import random
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any, Final

import structlog

SDK: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")  # of the extra `otel`
RATIO: Final = "parentbased_traceidratio"  # the sampler whose work we do
ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

log = structlog.get_logger()


def wants_traces(environ: Mapping[str, str]) -> bool:
    """Whether the standard variables name a collector for traces, and none of them switches traces off. Warns when they
    do and OpenTelemetry is not installed; imports none of it."""
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none"
    if is_off or not any(map(environ.get, ENDPOINTS)):
        return False
    with contextlib.suppress(ModuleNotFoundError):  # of what they are parts of
        if all(map(find_spec, SDK)):
            return True
    log.warning("no traces are sent: they need OpenTelemetry", way_out="pip install 'baton-serve[otel]'")
    return False


def _share(environ: Mapping[str, str]) -> float | None:
    """The share of the calls without a parent that are sampled. None: OpenTelemetry's own sampler decides."""
    if environ.get("OTEL_TRACES_SAMPLER") != RATIO:
        return None
    with contextlib.suppress(ValueError):  # of which OpenTelemetry warns
        return float(environ.get("OTEL_TRACES_SAMPLER_ARG", 1))
    return None


class Sdk:
    """One router's tracer and exporter."""

    def __init__(self, router_id: str) -> None:
        from opentelemetry import trace
        from opentelemetry.context import Context
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        class OneResource(Resource):
            __hash__ = object.__hash__  # because the exporter hashes each span's resource: its JSON, otherwise

        self._share = _share(os.environ)
        sampler = None if self._share is None else ParentBased(ALWAYS_ON)  # start() has chosen those without a parent
        described = {"service.instance.id": router_id}
        if "OTEL_SERVICE_NAME" not in os.environ and "service.name=" not in os.environ.get(
            "OTEL_RESOURCE_ATTRIBUTES", ""
        ):
            described["service.name"] = "baton"
        resource = Resource.create(described)
        resource = OneResource(resource.attributes, resource.schema_url)
        self._provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
        self._exporting = BatchSpanProcessor(OTLPSpanExporter())
        self._provider.add_span_processor(self._exporting)
        self._tracer = self._provider.get_tracer("baton")
        self._readable = partial(
            ReadableSpan, resource=self._provider.resource, instrumentation_scope=InstrumentationScope("baton")
        )
        self._propagator, self._no_parent = TraceContextTextMapPropagator(), Context()
        self._trace = trace

    def start(self, name: str, carrier: Mapping[str, str], attributes: dict[str, Any], at_ns: int) -> Any:
        """The span of a call, as a child of the caller's; None: it is not sampled.

        A call without a parent is chosen here: the SDK takes twenty times as long to say no.
        """
        parent = self._propagator.extract(carrier) if carrier else self._no_parent
        has_parent = bool(carrier) and self._trace.get_current_span(parent).get_span_context().is_valid
        if self._share is not None and not has_parent and random.random() >= self._share:
            return None
        kind = self._trace.SpanKind.SERVER
        span = self._tracer.start_span(name, parent, kind=kind, attributes=attributes, start_time=at_ns)
        return span if span.is_recording() else None

    def child(
        self, parent: Any, name: str, attributes: dict[str, Any], began_ns: int, ended_ns: int, problem: str
    ) -> Any:
        """A span that never was one of a tracer's, which would take ten times as long to make."""
        span_id = self._provider.id_generator.generate_span_id()
        context = self._trace.SpanContext(parent.trace_id, span_id, False, parent.trace_flags, parent.trace_state)
        status = self._failed(problem) if problem else self._trace.Status()
        self._exporting.on_end(
            self._readable(
                name, context, parent, attributes=attributes, status=status, start_time=began_ns, end_time=ended_ns
            )
        )
        return context

    def fail(self, span: Any, problem: str) -> None:
        span.set_status(self._failed(problem))

    def _failed(self, problem: str) -> Any:
        return self._trace.Status(self._trace.StatusCode.ERROR, problem)

    def shutdown(self) -> None:
        self._provider.shutdown()
