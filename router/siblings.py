"""The other routers of the namespace, which are asked over NATS, so that any one router can answer for all of them.

Routers hear of each other by what they charge (router/workers/charge_sharing.py). One that does not answer in time is
left out of the answer.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from runtime.nats.client import NATS_ERRORS, NatsClient
from runtime.nats.subjects import ask_subject

ANSWER_S = 0.5  # within which a router answers


class Siblings:
    """`others`: ids of the routers that are there."""

    def __init__(self, nats: NatsClient, router_id: str, others: Callable[[], Iterable[str]]) -> None:
        self._nats = nats
        self._router_id = router_id
        self._others = others

    async def answer(self, question: str, handler: Callable[[bytes], Coroutine[Any, Any, bytes]]) -> None:
        """From now on `handler` answers the question where another router asks it; with nothing: it has no answer."""
        await self._nats.answer(ask_subject(self._nats.namespace, self._router_id, question), handler)

    async def ask(self, question: str, payload: bytes = b"") -> list[bytes]:
        """The answers of the other routers, in the order of their ids."""
        others = sorted(set(self._others()) - {self._router_id})
        answers = await asyncio.gather(*(self._ask(router_id, question, payload) for router_id in others))
        return [answer for answer in answers if answer]

    async def _ask(self, router_id: str, question: str, payload: bytes) -> bytes:
        try:
            return await self._nats.request(ask_subject(self._nats.namespace, router_id, question), payload, ANSWER_S)
        except NATS_ERRORS:
            return b""
