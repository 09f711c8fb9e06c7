"""Loads that grow, on one address: so many requests at a time, so many a second, or a trace's."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from baton.bench.measured import Point, Timing, summed
from baton.bench.open_ai import Endpoint, Wishes
from baton.bench.workload import Amount, Ask, at_random, mean_rate, texts, trace_lines, traced
from runtime.errors import UnavailableError

PROBE = Amount(1, (500, 500), (8, 8))

Send = Callable[[Ask], Awaitable[Timing]]
Begin = Callable[[str, int], Callable[[], None]]
"""Gets a load's name and number of requests; what it returns is called for each that has ended."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """One load per number of `users` or `rates`, or one of the `trace`; without any of them, all requests at once.
    With a trace, `rates` scale its times. Because no prompt of one load shall be found in a cache by the next, each
    load has its own seed."""

    amount: Amount
    users: Sequence[int] = ()
    rates: Sequence[float] = ()
    trace: Path | None = None
    trace_limit: int | None = None
    speed: float = 1.0

    async def run(self, endpoint: Endpoint, wishes: Wishes, begin: Begin) -> tuple[str, list[Point]]:
        """The model's name, and what was measured. Raises ConfigError, UnavailableError."""
        model, loads = await self.timed(endpoint, wishes, begin)
        return model, [summed(name, timings) for name, timings in loads]

    async def timed(
        self, endpoint: Endpoint, wishes: Wishes, begin: Begin
    ) -> tuple[str, list[tuple[str, list[Timing]]]]:
        """The model's name, and each load's name and times; a trace's times are in its order. Raises ConfigError,
        UnavailableError."""
        async with endpoint:
            model = wishes.model or await _only_model(endpoint)
            wishes = replace(wishes, model=model)
            words_per_token = await _probed(endpoint, wishes)
            loads: list[tuple[str, list[Timing]]] = []
            for name, at_a_time, asks in self._loads(words_per_token):
                done = begin(name, len(asks))

                async def send(ask: Ask, done: Callable[[], None] = done) -> Timing:
                    timing = await endpoint.ask(ask, wishes)
                    done()
                    return timing

                timings = await (_at_times(send, asks) if at_a_time is None else _at_a_time(send, asks, at_a_time))
                if all(timing.problem for timing in timings):
                    raise UnavailableError(f"{name}: {timings[0].problem}")
                loads.append((name, timings))
            return model, loads

    def _loads(self, words_per_token: float) -> Iterator[tuple[str, int | None, list[Ask]]]:
        """(name, requests at a time or None where each has its own time, requests)"""
        if self.trace is not None:
            yield from self._traced(self.trace, words_per_token)
            return
        for number, users in enumerate(self.users or (() if self.rates else (self.amount.requests,))):
            name = f"{users} at a time" if self.users else "at once"
            yield name, users, self._asks(number, words_per_token)
        for number, rate in enumerate(self.rates):
            yield f"{rate:g} per s", None, at_random(self._asks(number, words_per_token), rate, self.amount.seed)

    def _traced(self, path: Path, words_per_token: float) -> Iterator[tuple[str, None, list[Ask]]]:
        lines, seed = trace_lines(path, self.trace_limit), self.amount.seed
        if not self.rates:
            yield "trace", None, traced(lines, self.speed, words_per_token, seed)
        for number, rate in enumerate(self.rates):
            speed = rate / mean_rate(lines, path)
            yield f"trace, {rate:g} per s", None, traced(lines, speed, words_per_token, seed + number)

    def _asks(self, number: int, words_per_token: float) -> list[Ask]:
        return texts(replace(self.amount, seed=self.amount.seed + number), words_per_token)


async def _at_a_time(send: Send, asks: Sequence[Ask], users: int) -> list[Timing]:
    """Each user sends the next request when its last one is answered."""
    timings, left = [], iter(asks)

    async def user() -> None:
        timings.extend([await send(ask) for ask in left])

    await asyncio.gather(*(user() for _ in range(users)))
    return timings


async def _at_times(send: Send, asks: Sequence[Ask]) -> list[Timing]:
    """Each request at its time, however many are in flight."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()

    async def later(ask: Ask) -> Timing:
        await asyncio.sleep(start_s + ask.at_s - loop.time())
        return await send(ask)

    return await asyncio.gather(*map(later, asks))


async def _only_model(endpoint: Endpoint) -> str:
    """Raises UnavailableError."""
    models = await endpoint.models()
    if len(models) != 1:
        raise UnavailableError(
            f"{endpoint.url} has several models; name one with --model: {', '.join(models) or 'none'}"
        )
    return models[0]


async def _probed(endpoint: Endpoint, wishes: Wishes) -> float:
    """English words per token of the model. Raises UnavailableError."""
    timing = await endpoint.ask(texts(PROBE, words_per_token=1.0)[0], wishes)
    if timing.problem:
        raise UnavailableError(timing.problem)
    return PROBE.prompt[0] / timing.prompt_tokens
