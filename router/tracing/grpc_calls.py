"""A trace around each gRPC call of Generate."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from router.tracing.traces import Traces

GENERATE = "/baton.v1.Inference/Generate"
ATTRIBUTES = {"rpc.system": "grpc", "rpc.service": "baton.v1.Inference", "rpc.method": "Generate"}


class TraceCalls(grpc.aio.ServerInterceptor):
    """The innermost interceptor: only calls that show the right key get a trace."""

    def __init__(self, traces: Traces) -> None:
        self._traces = traces

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None or details.method != GENERATE:
            return handler
        behaviour = handler.unary_stream

        async def serve(request: Any, context: Any) -> None:
            wanted = ("traceparent", "tracestate")
            carrier = {key: value for key, value in context.invocation_metadata() or () if key in wanted}
            operation = "chat" if request.HasField("chat") else "text_completion"
            async with self._traces.call(GENERATE[1:], operation, carrier, ATTRIBUTES) as trace:
                try:
                    await behaviour(request, context)
                finally:
                    if trace is not None:
                        code = context.code() or 0  # a StatusCode, or its number, or nothing yet
                        number = code.value[0] if isinstance(code, grpc.StatusCode) else code
                        trace.attributes["rpc.grpc.status_code"] = number

        return grpc.unary_stream_rpc_method_handler(serve, handler.request_deserializer, handler.response_serializer)
