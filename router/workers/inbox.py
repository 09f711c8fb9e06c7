"""The deltas of one submitted request that wait for the coroutine that streams them. Event loop only."""

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from baton_proto.worker import Delta
from router.workers.pace import Pace

MAX_UNREAD = 512  # deltas; more of them wait only when the client has stopped reading. Of a token or a few each


def nothing() -> None:
    """What a full inbox calls that nobody listens to."""


class UnreadError(Exception):
    """MAX_UNREAD deltas wait, and the request was stopped on its worker."""


class Inbox:
    """One reader. What came before a failure is read before the failure is raised. `full` is called when MAX_UNREAD
    deltas wait."""

    __slots__ = ("_deltas", "_error", "_is_held", "_pace", "_waiter", "full", "has_begun")

    def __init__(self, pace: Pace) -> None:
        self.full: Callable[[], None] = nothing
        self.has_begun = False  # its first delta has come
        self._pace = pace
        self._is_held = False  # `pace` wakes the reader
        self._deltas: list[Delta] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delta: Delta, *, at_once: bool) -> None:
        """at_once: it waits for no turn, see `Pace`."""
        self._deltas.append(delta)
        if len(self._deltas) >= MAX_UNREAD:
            self.full()
        if at_once:
            self._pace.hurry(self)
        elif not self._is_held:
            self._is_held = True
            self._pace.hold(self)

    def fail(self, error: Exception) -> None:
        """The first failure counts."""
        if self._error is None:
            self._error = error
            self._pace.hurry(self)

    async def take(self) -> list[Delta]:
        """All deltas that have arrived since the last call, at least one. Raises what `fail` was given."""
        if not self._deltas:
            if self._error is None:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            if not self._deltas:
                assert self._error is not None
                error, self._error = self._error, None
                try:
                    raise error
                finally:
                    del error  # else it would stay with its frames, and with the request, until the collector comes
        deltas, self._deltas = self._deltas, []
        return deltas

    def wake(self) -> None:
        """Wakes the reader, unless all has been read meanwhile."""
        self._is_held = False
        has_news = self._deltas or self._error is not None
        if has_news and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def cut_after(deltas: list[Delta], num_tokens: int) -> tuple[list[Delta], list[Delta]]:
    """Returns (news of the next `num_tokens` tokens, what follows them). The end of the request follows."""
    for at, delta in enumerate(deltas):
        tokens, logprobs = delta.token_ids, delta.logprobs
        if len(tokens) < num_tokens:
            num_tokens -= len(tokens)
        elif len(tokens) == num_tokens and delta.finish is None:
            return deltas[: at + 1], deltas[at + 1 :]
        else:
            is_whole = len(tokens) == num_tokens
            stops = (delta.stop_token, None) if is_whole else (None, delta.stop_token)
            first = replace(
                delta, token_ids=tokens[:num_tokens], logprobs=logprobs[:num_tokens], finish=None, stop_token=stops[0]
            )
            rest = Delta(
                delta.request_id, tokens[num_tokens:], logprobs[num_tokens:], finish=delta.finish, stop_token=stops[1]
            )
            return [*deltas[:at], first], [rest, *deltas[at + 1 :]]
    return deltas, []
