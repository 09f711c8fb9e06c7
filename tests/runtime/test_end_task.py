"""A cancelled task ends, whatever it does with its cancellation, and tasks that belong together end together."""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from runtime.end_task import end_tasks, run_all


async def test_a_task_that_swallows_a_cancellation_ends() -> None:
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed == 3:
                    raise

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await asyncio.wait_for(end_tasks(task), 30)
    assert task.cancelled()
    assert swallowed == 3


async def test_what_a_task_raises_at_its_end_stays_with_it() -> None:
    async def fail() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise ValueError("no")

    task = asyncio.create_task(fail())
    await asyncio.sleep(0)
    await end_tasks(task)
    with pytest.raises(ValueError, match="no"):
        task.result()


async def test_no_tasks_end_at_once() -> None:
    await end_tasks()


async def test_the_first_error_of_several_ends_the_others_and_comes_as_it_is() -> None:
    ended: list[str] = []

    async def other() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.2)  # the last steps of a process that is stopped take their time
            ended.append("other")
            raise ValueError("of its last steps")

    async def fail() -> None:
        await asyncio.sleep(0.01)
        raise KeyError("first")

    with pytest.raises(KeyError, match="first"):
        await run_all([other(), fail(), asyncio.sleep(0)])
    assert ended == ["other"]
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling(), "no timeout of this task ends in TimeoutError any more (3.11.2)"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await asyncio.sleep(60)


async def test_all_that_run_together_end_with_whoever_waits_for_them() -> None:
    ended: list[int] = []

    async def one(number: int) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(number)

    task = asyncio.create_task(run_all(map(one, range(3))))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [0, 1, 2]
    await run_all([])


async def test_what_cannot_be_begun_leaves_nothing_running() -> None:
    """As where a process builds one engine after the other, and the second one's memory is not there."""
    begun: list[asyncio.Task[None] | None] = []

    async def one() -> None:
        begun.append(asyncio.current_task())
        await asyncio.sleep(60)

    def built() -> Iterator[Coroutine[Any, Any, None]]:
        yield one()
        raise KeyError("no memory")

    before = asyncio.all_tasks()
    with pytest.raises(KeyError, match="no memory"):
        await run_all(built())
    assert asyncio.all_tasks() == before
    assert not begun
