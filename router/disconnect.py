"""Ends a request's work as soon as its HTTP client goes away. Called by http_generation."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work`, whose request body has been read, in the caller's task. Raises what it raises, or ClientDisconnect
    after cancelling it."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:  # else somebody else cancels us too
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()
