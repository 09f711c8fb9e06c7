"""Ending tasks for certain."""

import asyncio
from typing import Any

AGAIN_S = 0.1


async def end_tasks(*tasks: "asyncio.Task[Any] | None") -> None:
    """Cancels the tasks that were made, and waits until they have ended. Raises nothing: their errors stay with the
    tasks.

    Cancels again and again, because `asyncio.wait_for` of Python 3.11 swallows a cancellation when the result comes at
    the same moment; a task that loops over requests would go on for ever.
    """
    alive = {task for task in tasks if task is not None}
    while alive:
        for task in alive:
            task.cancel()
        _, alive = await asyncio.wait(alive, timeout=AGAIN_S)
