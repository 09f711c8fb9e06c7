"""Decodes requests: long ones in the side lane, after their fields are counted, the others at once.

What is no protobuf message ends with INVALID_ARGUMENT; health and reflection take it for an empty one. gRPC itself
would answer UNKNOWN with the name of a Python class, and log a stack trace.
"""

import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.message import DecodeError, Message

from router.api.grpc.errors import status_of
from router.api.grpc.wire_size import num_fields
from router.api.validation import IN_PLACE_BYTES
from router.requests.side_lane import SideLane
from runtime.errors import BatonError, InvalidRequestError

Handler = Any  # grpc.RpcMethodHandler[...]
Behaviour = Callable[[Any, Any], Any]  # a coroutine or an asynchronous generator


MAX_FIELDS = 64 * 1024  # of a message and those inside


@dataclass(frozen=True, slots=True)
class _Encoded:
    """What is still to be decoded."""

    data: bytes
    decode: Callable[[bytes], Message]


class DecodeRequests(grpc.aio.ServerInterceptor):
    """Guards the unary requests of the services in `file`. Their methods are coroutines or asynchronous generators."""

    def __init__(self, file: FileDescriptor, lane: SideLane) -> None:
        self._lane = lane
        self._kinds = {
            f"/{service.full_name}/{method.name}": method.input_type
            for service in file.services_by_name.values()
            for method in service.methods
        }

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(details)
        kind = self._kinds.get(details.method)
        if handler is None:
            return None
        if kind is None or handler.request_streaming:
            return handler._replace(request_deserializer=_or_empty(handler.request_deserializer))
        make, behaviour = grpc.unary_unary_rpc_method_handler, handler.unary_unary
        if handler.response_streaming:
            make, behaviour = grpc.unary_stream_rpc_method_handler, handler.unary_stream
        decode = partial(_Encoded, decode=handler.request_deserializer)
        return make(self._decoding(behaviour, kind), decode, handler.response_serializer)

    def _decoding(self, behaviour: Behaviour, kind: Descriptor) -> Behaviour:
        async def decoded(request: _Encoded, context: Any) -> Any:
            try:
                if len(request.data) <= IN_PLACE_BYTES:
                    return request.decode(request.data)
                left_s = context.time_remaining()
                deadline_s = None if left_s is None else time.monotonic() + left_s
                return await self._lane.run(deadline_s, _decode_long, request, kind)
            except DecodeError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"request: {error}")
            except BatonError as error:
                status = status_of(error, "")
                await context.abort(status.code, status.details, tuple(status.trailing_metadata))

        async def serve(request: Any, context: Any) -> Any:
            return await behaviour(await decoded(request, context), context)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            async with aclosing(behaviour(await decoded(request, context), context)) as messages:
                async for message in messages:
                    yield message

        return stream if inspect.isasyncgenfunction(behaviour) else serve


def _or_empty(decode: Callable[[bytes], Message]) -> Callable[[bytes], Message]:
    def decoded(data: bytes) -> Message:
        try:
            return decode(data)
        except DecodeError:
            return decode(b"")

    return decoded


def _decode_long(request: _Encoded, kind: Descriptor) -> Message:
    if num_fields(request.data, kind, MAX_FIELDS) > MAX_FIELDS:
        raise InvalidRequestError("request", f"has more than {MAX_FIELDS} fields; token ids are to be packed")
    return request.decode(request.data)
