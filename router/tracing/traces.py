"""The traces of requests: which are sampled, what belongs to one, and the thread that makes and exports their spans.

On the event loop a traced request costs one span and an entry in a bounded queue; the thread makes its other spans
after the request's end, from the stamps that the request has anyway (router/views/hops.py).
"""

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import structlog

from router.counters.recent import Recent, RecentRequest
from router.tracing.sdk import Sdk
from router.tracing.spans import add_spans

MAX_WAITING: Final = 1024  # requests that have ended and have no spans yet; more are dropped
CLOSE_S: Final = 5.0  # for the last spans to leave

log = structlog.get_logger()


@dataclass(slots=True)
class Trace:
    """A call that is sampled."""

    span: Any
    operation: str  # a name of OpenTelemetry's conventions
    began_s: float  # time.monotonic(), at the same moment as the next
    began_ns: int  # Unix time
    requests: list[tuple[str, RecentRequest]] = field(default_factory=list)  # one per prompt, with its model
    attributes: dict[str, Any] = field(default_factory=dict)  # of the call's end
    problem: str = ""
    ended_s: float = 0.0

    def nanoseconds(self, at_s: float) -> int:
        """A monotonic time as Unix time."""
        return self.began_ns + round((at_s - self.began_s) * 1e9)


class Traces:
    def __init__(self, router_id: str, requests: Mapping[str, Recent]) -> None:
        """`requests`: of each model. The SDK must be installed, see wants_traces."""
        self._sdk = Sdk(router_id)
        self._current: ContextVar[Trace | None] = ContextVar("trace", default=None)
        self._ended: queue.Queue[Trace | None] = queue.Queue(MAX_WAITING)
        self._dropped = 0
        for model, recent in requests.items():
            recent.on_request = partial(self._begun, model)
        self._thread = threading.Thread(target=self._make_spans, name="traces", daemon=True)
        self._thread.start()

    @asynccontextmanager
    async def call(
        self, name: str, operation: str, carrier: Mapping[str, str], attributes: dict[str, Any]
    ) -> AsyncIterator[Trace | None]:
        """Around a call; None: it is not sampled. `carrier`: its headers, where `traceparent` may be. The caller must
        have shown its key: a caller with a `traceparent` decides by itself that it is sampled."""
        began_ns, began_s = time.time_ns(), time.monotonic()
        span = self._sdk.start(name, carrier, attributes, began_ns)
        if span is None:
            yield None
            return
        trace = Trace(span, operation, began_s, began_ns)
        token = self._current.set(trace)
        try:
            yield trace
        except BaseException as error:
            trace.problem = trace.problem or type(error).__name__
            raise
        finally:
            self._current.reset(token)
            trace.ended_s = time.monotonic()
            self._queue(trace)

    async def close(self) -> None:
        """Exports what is left, within CLOSE_S."""
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        try:
            self._ended.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _begun(self, model: str, request: RecentRequest) -> None:
        if (trace := self._current.get()) is not None:
            trace.requests.append((model, request))

    def _queue(self, trace: Trace) -> None:
        try:
            self._ended.put_nowait(trace)
        except queue.Full:
            self._dropped += 1
            if self._dropped.bit_count() == 1:
                log.warning("traces are dropped: they end faster than they are exported", dropped=self._dropped)

    def _make_spans(self) -> None:
        while (trace := self._ended.get()) is not None:
            try:
                for model, request in trace.requests:
                    facts = {"gen_ai.operation.name": trace.operation, "gen_ai.request.model": model}
                    add_spans(self._sdk, trace.span.get_span_context(), request, facts, trace.nanoseconds)
                trace.span.set_attributes(trace.attributes)
                if trace.problem:
                    self._sdk.fail(trace.span, trace.problem)
                trace.span.end(trace.nanoseconds(trace.ended_s))
            except Exception:
                log.exception("a trace is lost")
        self._sdk.shutdown()


Application = Callable[[Any, Any, Any], Awaitable[None]]


def over_http(traces: Traces, path: str, endpoint: Application) -> Application:
    """The endpoint of POST requests for text at `path`, with a trace around each of its calls."""
    name, operation = f"POST {path}", "text_completion" if path == "/v1/completions" else "chat"
    attributes = {"http.request.method": "POST", "http.route": path, "url.path": path}
    wanted = {b"traceparent", b"tracestate"}

    async def traced(scope: Any, receive: Any, send: Any) -> None:
        carrier = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in wanted}
        async with traces.call(name, operation, carrier, attributes) as trace:
            await endpoint(scope, receive, send if trace is None else _noting_status(send, trace))

    return traced


def _noting_status(send: Any, trace: Trace) -> Any:
    async def noting(message: Any) -> None:
        if message["type"] == "http.response.start":
            trace.attributes["http.response.status_code"] = message["status"]
            if message["status"] >= 500:
                trace.problem = f"status {message['status']}"
        await send(message)

    return noting
