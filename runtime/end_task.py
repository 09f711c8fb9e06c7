"""Tasks that end for certain, alone or all together."""

import asyncio
from collections.abc import Coroutine, Iterable
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


async def run_all(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs them at the same time. When one of them fails, the others are cancelled, and once they have ended, its error
    is raised.

    In the place of asyncio.TaskGroup, whose failure leaves a task of Python 3.11 and 3.12 counted as cancelled; in
    3.11.2 no asyncio.timeout of that task ends in TimeoutError any more.
    """
    tasks: list[asyncio.Task[None]] = []
    ended: set[asyncio.Task[None]] = set()
    try:
        for one in coroutines:  # which may fail to be made
            tasks.append(asyncio.create_task(one))  # noqa: PERF401
        if tasks:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()  # once, for its last steps to have the time that they take
        if tasks:
            await asyncio.wait(tasks)
    failed = [task for task in (*ended, *tasks) if not task.cancelled() and task.exception() is not None]
    if failed:
        failed[0].result()
