"""Reads and decodes requests: long ones in the side lane, after their fields are counted, the others at once.

What is no protobuf message ends with INVALID_ARGUMENT; health and reflection take it for an empty one. gRPC itself
would answer UNKNOWN with the name of a Python class, and log a stack trace.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from functools import partial
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.message import DecodeError, Message

from router.api.grpc.calling import deadline_s
from router.api.grpc.connections import GrpcConnections
from router.api.grpc.errors import status_of
from router.api.grpc.receiving import Receiving
from router.api.grpc.wire_size import num_fields
from router.api.wishes.validation import IN_PLACE_BYTES
from runtime.errors import BatonError, InvalidRequestError
from runtime.side_lane import SideLane

Handler = Any  # grpc.RpcMethodHandler[...]
Behaviour = Callable[
    [Any, Any], Any
]  # a coroutine or an asynchronous generator of a request or requests, and a context
Decode = Callable[[bytes], Message]
Call = Callable[[str], AbstractContextManager[None]]  # around what a call of this peer does
Read = Callable[[Any], Awaitable[Any]]  # the next request of a context's call
EnterTenant = Callable[[Any], str]  # see Calls


MAX_FIELDS = 64 * 1024  # of a message and those inside


class DecodeRequests(grpc.aio.ServerInterceptor):
    """Stands before all methods. Methods are coroutines or asynchronous generators. The requests of a stream, of a
    service in `files`, raise BatonError when the next one cannot be read."""

    def __init__(
        self,
        files: Sequence[FileDescriptor],
        lane: SideLane,
        receiving: Receiving,
        connections: GrpcConnections,
        enter_tenant: EnterTenant,
    ) -> None:
        self._connections = connections
        self._lane = lane
        self._receiving = receiving
        self._enter_tenant = enter_tenant
        self._kinds = {
            f"/{service.full_name}/{method.name}": method.input_type
            for file in files
            for service in file.services_by_name.values()
            for method in service.methods
        }

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        """Because gRPC reads a unary request before anything of ours runs, each method becomes one of streams."""
        handler = await continuation(details)
        if handler is None:
            return None
        kind = self._kinds.get(details.method)
        whole = partial(self._read_or_raise, handler.request_deserializer, kind)
        read = whole if handler.request_streaming and kind is not None else partial(_or_abort, whole)
        request = partial(_all if handler.request_streaming else _one, read)
        call = _unseen if kind is None else self._connections.call
        if handler.unary_unary is not None:
            serve = _coroutine(handler.unary_unary, request, call)
            return grpc.stream_unary_rpc_method_handler(serve, None, handler.response_serializer)
        behaviour = handler.stream_stream or handler.unary_stream
        serve = (_generator if inspect.isasyncgenfunction(behaviour) else _coroutine)(behaviour, request, call)
        return grpc.stream_stream_rpc_method_handler(serve, None, handler.response_serializer)

    async def _read_or_raise(self, decode: Decode, kind: Descriptor | None, context: Any) -> Any:
        """The next request of a call; None: it has no more. Raises BatonError."""
        with self._connections.reading(context.peer()):
            async with self._receiving.message(context, self._enter_tenant(context)) as data:
                if data is None:
                    return None
                head_bytes = sum(len(name) + len(value) for name, value in context.invocation_metadata())
                self._connections.has_read(context.peer(), head_bytes + len(data))
                if kind is None:
                    return _or_empty(decode, data)
                try:
                    if len(data) <= IN_PLACE_BYTES:
                        return decode(data)
                    return await self._lane.run(deadline_s(context), _decode_long, decode, data, kind)
                except DecodeError as error:
                    raise InvalidRequestError("request", str(error)) from error


async def _or_abort(read: Read, context: Any) -> Any:
    try:
        return await read(context)
    except BatonError as error:
        status = status_of(error, "")
        await context.abort(status.code, status.details, tuple(status.trailing_metadata))


async def _one(read: Read, context: Any) -> Any:
    if (request := await read(context)) is None:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "request: is missing")
    return request


async def _all(read: Read, context: Any) -> AsyncIterator[Any]:
    async def requests() -> AsyncIterator[Any]:
        while (request := await read(context)) is not None:
            yield request

    return requests()


def _unseen(peer: str) -> AbstractContextManager[None]:
    """Health and reflection are open to all, or ask nothing of the service."""
    return nullcontext()


def _coroutine(behaviour: Behaviour, request: Read, call: Call) -> Behaviour:
    async def serve(_: object, context: Any) -> Any:
        wanted = await request(context)
        with call(context.peer()):
            return await behaviour(wanted, context)

    return serve


def _generator(behaviour: Behaviour, request: Read, call: Call) -> Behaviour:
    async def serve(_: object, context: Any) -> AsyncIterator[Any]:
        wanted = await request(context)
        with call(context.peer()):
            async with aclosing(behaviour(wanted, context)) as messages:
                async for message in messages:
                    yield message

    return serve


def _or_empty(decode: Decode, data: bytes) -> Message:
    try:
        return decode(data)
    except DecodeError:
        return decode(b"")


def _decode_long(decode: Decode, data: bytes, kind: Descriptor) -> Message:
    if num_fields(data, kind, MAX_FIELDS) > MAX_FIELDS:
        raise InvalidRequestError("request", f"has more than {MAX_FIELDS} fields; token ids are to be packed")
    return decode(data)
