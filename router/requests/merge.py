"""Several streams as one, item by item as they come."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from router.requests.spread import Spread
from runtime.end_task import end_tasks

MAX_WAITING = 64  # items that are not taken yet, before the streams have to wait

T = TypeVar("T")


async def merge(
    streams: Sequence[AsyncGenerator[T, None]], spread: Spread | None = None
) -> AsyncGenerator[tuple[int, T], None]:
    """(number of the stream, item). Streams begin at once, or when their turn of `spread` comes. The first failure ends
    all streams."""
    news: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(MAX_WAITING)

    async def pump(number: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream) as items:
                if spread is not None:
                    await spread.turn()
                async for item in items:
                    await news.put((number, item))
        except Exception as error:
            await news.put(error)
        else:
            await news.put(None)  # the stream has ended

    pumps = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        running = len(pumps)
        while running:
            arrived = await news.get()
            if isinstance(arrived, Exception):
                raise arrived
            if arrived is None:
                running -= 1
            else:
                yield arrived
    finally:
        await end_tasks(*pumps)
