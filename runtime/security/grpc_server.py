"""A gRPC server that no method name can end.

grpc 1.85 reads the names of methods that nobody has registered in the loop that accepts all calls. A name that is not
UTF-8 ends this loop, and the server with it. Here such calls are answered beside the loop, without a look at the name.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc.aio
from grpc._cython import cygrpc
from grpc.aio import _server


def grpc_server(options: Sequence[tuple[str, Any]], interceptors: Sequence[Any]) -> grpc.aio.Server:
    """Serves the methods that are added by `add_registered_method_handlers`, which generated code calls."""
    return _Server(options, interceptors)  # type: ignore[return-value]  # its types know grpc.aio.Server alone


class _Server(_server.Server):
    def __init__(self, options: Sequence[tuple[str, Any]], interceptors: Sequence[Any]) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _Core(self._loop, None, (), interceptors, tuple(options), None)


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    def _make_request_call_future(self, method: bytes | None) -> "asyncio.Future[Any]":
        if method is None:
            return asyncio.get_running_loop().create_task(self._refuse_unregistered())
        future: asyncio.Future[Any] = super()._make_request_call_future(method)
        return future

    async def _refuse_unregistered(self) -> None:
        """Answers UNIMPLEMENTED until the server stops. Invariant: it never returns, because what it returned would
        be taken for a call."""
        loop = asyncio.get_running_loop()
        answers: set[asyncio.Task[None]] = set()
        while True:
            try:
                call = await self._request_call()
            except cygrpc._RequestCallError:
                if self.is_running():
                    continue
                raise
            answer = cygrpc._handle_rpc("", _NoMethods(), (), call, loop, False)
            task = loop.create_task(cygrpc._schedule_rpc_coro(answer, call, loop, "unknown"))
            answers.add(task)
            task.add_done_callback(answers.discard)


class _NoMethods:
    def resolve_handler(self, details: object) -> None: ...
