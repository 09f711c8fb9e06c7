"""A worker is killed in the middle of its work, however late a busy machine finds it there."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import TypeVar

from tests.service import Service
from tests.spine.worker_view import first_running

T = TypeVar("T")


async def killed_while_busy(
    service: Service,
    worker_ids: Sequence[str],
    ask: Callable[[int], Awaitable[T]],
    callers: int,
    kill: Callable[[str], object] | None = None,
    begun: asyncio.Event | None = None,
    prompt_tokens: int = 0,
) -> tuple[str, dict[int, T]]:
    """Callers ask on and on, with numbers from 0, while the first of the workers that is seen with a sequence in its
    batch is killed, after `begun`. With `prompt_tokens` so many are not computed yet: a prompt ends later than the
    signal arrives. Returns its id, and the answers by number."""
    lost, numbers, answers = "", count(), dict[int, T]()

    async def ask_on() -> None:
        while not lost:
            number = next(numbers)
            answers[number] = await ask(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(callers):
            group.create_task(ask_on())
        if begun is not None:
            await begun.wait()
        lost = await first_running(service, worker_ids, prompt_tokens=prompt_tokens, then=kill or service.kill)
    return lost, answers
