"""Requests that wait for their grammar, which a thread compiles."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from baton_proto.grammar import Grammar
from runtime.errors import BatonError
from runtime.grammar.matcher import Matcher

K = TypeVar("K", bound=Hashable)


class Compiling(Generic[K]):
    """By (stream, request id). Event loop only. `matcher` raises BatonError alone."""

    def __init__(self, matcher: Callable[[Grammar | None], Awaitable[Matcher]]) -> None:
        self._matcher = matcher
        self._waiting: dict[tuple[K, str], asyncio.Task[None]] = {}

    def start(
        self,
        key: tuple[K, str],
        grammar: Grammar | None,
        then: Callable[[Matcher], None],
        failed: Callable[[BatonError], None],
    ) -> None:
        """One of the two is called later, unless the wait is cancelled."""

        async def compiled() -> None:
            try:
                matcher = await self._matcher(grammar)
            except BatonError as error:
                del self._waiting[key]
                failed(error)
            else:
                del self._waiting[key]
                then(matcher)

        self._waiting[key] = asyncio.create_task(compiled())

    def cancel(self, key: tuple[K, str]) -> bool:
        """Ends the wait. False: there is none."""
        task = self._waiting.pop(key, None)
        return task is not None and task.cancel()

    def cancel_of(self, stream: K) -> None:
        """Ends the waits of a stream that is gone."""
        for key in [key for key in self._waiting if key[0] is stream]:
            self.cancel(key)

    def __contains__(self, key: tuple[K, str]) -> bool:
        return key in self._waiting
