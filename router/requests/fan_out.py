"""Runs the requests of one call as one stream: one request, or one per prompt of /v1/completions."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import accumulate

import msgspec

from router.requests.frontend import Generator
from router.requests.merge import merge
from router.requests.request import Finished, GenerateRequest, Piece, sum_of
from router.requests.spread import Spread

MAX_BESIDE = 64  # requests of a call that run at a time


def generate_all(generator: Generator, requests: Sequence[GenerateRequest]) -> AsyncGenerator[Piece | Finished, None]:
    """The pieces of all requests as they come, choices numbered through, then one Finished for all. Use with
    `aclosing`."""
    return generator.generate(requests[0]) if len(requests) == 1 else _numbered_through(generator, requests)


async def _numbered_through(
    generator: Generator, requests: Sequence[GenerateRequest]
) -> AsyncGenerator[Piece | Finished, None]:
    ended: list[Finished] = []
    offsets = [0, *accumulate(len(request.sampling) for request in requests)]
    places = asyncio.Semaphore(MAX_BESIDE)
    streams = [_in_its_place(generator.generate(request), places) for request in requests]
    async with aclosing(merge(streams, Spread())) as merged:
        async for position, item in merged:
            if isinstance(item, Finished):
                ended.append(item)
            else:
                offset = offsets[position]
                yield msgspec.structs.replace(item, index=offset + item.index) if offset else item
    yield sum_of(ended)


async def _in_its_place(
    stream: AsyncGenerator[Piece | Finished, None], places: asyncio.Semaphore
) -> AsyncGenerator[Piece | Finished, None]:
    async with aclosing(stream) as items, places:
        async for item in items:
            yield item
