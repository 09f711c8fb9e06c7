"""Ends a request's work as soon as its HTTP client goes away, or no longer takes what it asked for. Called by
http_generation.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


class StalledClientError(Exception):
    """The client has kept its connection and does not read from it."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Runs `work`, whose request body has been read. Raises what it raises, or cancels it and raises ClientDisconnect,
    or StalledClientError after `timeout_s`: the work keeps its own deadline, so only sending can take longer.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect if gone.done() else StalledClientError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
