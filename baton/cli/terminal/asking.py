"""One question to the router's Admin API, with errors that name the router."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from baton.cli.terminal.access import Access
from baton.cli.terminal.exit_codes import ExitCode, errors_reported, fail
from runtime.calls.router import Client

T = TypeVar("T")


async def asked(access: Access, question: Callable[[Client], Awaitable[T]]) -> T:
    """The answer to `question`. Raises as Access.client does."""
    async with access.client() as client:
        return await question(client)


def ask(access: Access, timeout_s: float, question: Callable[[Client], Awaitable[T]]) -> T:
    """The answer to `question`, which keeps to `timeout_s` itself. Ends the command with an exit code without one."""

    with errors_reported():
        try:
            return asyncio.run(asked(access, question))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                fail(ExitCode.UNAVAILABLE, f"no router answers at {access.place}: {error.details()}")
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                fail(ExitCode.DEADLINE, f"the router at {access.place} did not answer within {timeout_s:g} s")
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                fail(ExitCode.FAILED, f"the router at {access.place} is older than this command and cannot answer it")
            raise
