"""Ending tasks for certain."""

import asyncio
from typing import Any

AGAIN_S = 0.1


async def end_tasks(*tasks: "asyncio.Task[Any]") -> None:
    """Cancels the tasks and waits until they have ended; what they raise stays with them.

    One cancellation is not enough: `asyncio.wait_for` of Python 3.11 swallows it when the result comes at the same
    moment, and a task that loops over requests then goes on for ever.
    """
    alive = set(tasks)
    while alive:
        for task in alive:
            task.cancel()
        _, alive = await asyncio.wait(alive, timeout=AGAIN_S)
