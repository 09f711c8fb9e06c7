"""A cancelled task ends, whatever it does with its cancellation."""

import asyncio

import pytest

from runtime.end_task import end_tasks


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
