"""Refuses requests that are not protobuf messages with INVALID_ARGUMENT.

gRPC itself would answer UNKNOWN with the name of a Python class, and log a stack trace.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

Handler = Any  # grpc.RpcMethodHandler[...]
Behaviour = Callable[[Any, Any], Any]  # a coroutine or an asynchronous generator


@dataclass(frozen=True, slots=True)
class _Undecodable:
    problem: str


class RefuseUndecodable(grpc.aio.ServerInterceptor):
    """Guards the unary requests of the services whose names begin with `prefix`. Their methods are coroutines or
    asynchronous generators."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(details)
        if handler is None or not details.method.startswith(self._prefix) or handler.request_streaming:
            return handler
        make, behaviour = grpc.unary_unary_rpc_method_handler, handler.unary_unary
        if handler.response_streaming:
            make, behaviour = grpc.unary_stream_rpc_method_handler, handler.unary_stream
        return make(_guarded(behaviour), _tolerant(handler.request_deserializer), handler.response_serializer)


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decode(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return _Undecodable(str(error))

    return decode


def _guarded(behaviour: Behaviour) -> Behaviour:
    async def check(request: Any, context: Any) -> None:
        if isinstance(request, _Undecodable):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"request: {request.problem}")

    async def serve(request: Any, context: Any) -> Any:
        await check(request, context)
        return await behaviour(request, context)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        await check(request, context)
        async with aclosing(behaviour(request, context)) as messages:
            async for message in messages:
                yield message

    return stream if inspect.isasyncgenfunction(behaviour) else serve
