"""Ends a request's work as soon as its HTTP client disconnects or stops reading."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


class StalledClientError(Exception):
    """The client keeps its connection and does not read from it."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Runs `work` in the caller's task, after the request's body was read. Raises what `work` raises; cancels it and
    raises ClientDisconnect, or StalledClientError after `timeout_s`. Because `work` keeps its own deadline, only
    sending can take longer.
    """
    task = asyncio.current_task()
    assert task is not None
    reason: Exception | None = None

    def end(error: Exception) -> None:
        nonlocal reason
        reason = reason or error
        task.cancel()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        end(ClientDisconnect())

    watcher = asyncio.create_task(watch())
    stalled = asyncio.get_running_loop().call_later(timeout_s, end, StalledClientError())
    try:
        return await work
    except asyncio.CancelledError:
        if reason is not None and task.uncancel() == 0:  # else another task cancels this one too
            raise reason from None
        raise
    finally:
        watcher.cancel()
        stalled.cancel()
