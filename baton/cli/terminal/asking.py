"""One question to the router's Admin API."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from baton.cli.terminal.exit_codes import errors_reported
from baton.runs.access import Access
from runtime.calls.router import Client

T = TypeVar("T")


def ask(access: Access, timeout_s: float, question: Callable[[Client], Awaitable[T]]) -> T:
    """The answer to `question`, which keeps to `timeout_s` itself. Ends the command with an exit code without one."""

    async def asked() -> T:
        async with access.client(timeout_s) as client:
            return await question(client)

    with errors_reported():
        return asyncio.run(asked())
