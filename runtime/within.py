"""Waits for something to happen, but not for ever."""

import asyncio
import contextlib


async def happens(event: asyncio.Event, timeout_s: float) -> bool:
    """Waits until the event is set, at most so long. Returns whether it is."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()
