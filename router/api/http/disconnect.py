"""Ends a request's work as soon as its HTTP client disconnects. A client that stops reading is disconnected by
connection.py."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive

T = TypeVar("T")

NOBODY = Response(status_code=499)  # the answer to a client that has left, as nginx counts it


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` in the caller's task, after the request's body was read. Raises what `work` raises; cancels it and
    raises ClientDisconnect when the client has left."""
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
        if gone and task.uncancel() == 0:  # else another task cancels this one too
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()
