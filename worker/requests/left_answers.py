"""Answers that were left before their end: their router or their client is gone, and may come back for the rest."""

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Final

from baton_proto.routers.left import NOTHING_READ, LeftAnswer, read_on

KEPT_S: Final = 60.0
MAX_TOKENS: Final = 2**20  # of all answers, 4 MiB
MIN_CHARGE: Final = 256  # of an answer, so that there are not too many to look through


class LeftAnswers:
    """Keeps the tokens of left answers for KEPT_S; the oldest leave when there are too many. Event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, tuple[float, array[int]]] = OrderedDict()  # by the worker's id of the request
        self._num_tokens = 0

    def keep(self, request_id: str, token_ids: Sequence[int]) -> None:
        """`request_id`: as the router has submitted it, REQUEST/CHOICE.ATTEMPT."""
        if token_ids:
            self._forget(request_id)
            self._kept[request_id] = (self._clock() + KEPT_S, array("I", token_ids))
            self._num_tokens += _charged(token_ids)
        while self._kept and (self._num_tokens > MAX_TOKENS or next(iter(self._kept.values()))[0] < self._clock()):
            self._forget(next(iter(self._kept)))

    def find(self, asked: LeftAnswer, in_flight: Iterable[Sequence[int]]) -> bytes | None:
        """The tokens that are asked for, u32 LE. `in_flight`: answers to the request whose router, for all we know, is
        there."""
        now_s = self._clock()
        kept = (
            token_ids
            for name, (until_s, token_ids) in self._kept.items()
            if until_s >= now_s and is_of(name, asked.request_id)
        )
        for token_ids in chain(kept, in_flight):
            if len(token_ids) >= asked.tokens:
                told = array("I", token_ids[: asked.tokens])
                if read_on(NOTHING_READ, told) == asked.check:
                    return told.tobytes()
        return None

    def _forget(self, request_id: str) -> None:
        _, token_ids = self._kept.pop(request_id, (0.0, ()))
        self._num_tokens -= _charged(token_ids) if token_ids else 0


def _charged(token_ids: Sequence[int]) -> int:
    return max(MIN_CHARGE, len(token_ids))


def is_of(name: str, request_id: str) -> bool:
    """Whether the router's name of a choice is of a request. Routers put an ending to an id that the caller gave."""
    work_id, _, _ = name.rpartition("/")
    return work_id == request_id or work_id.startswith(f"{request_id}-")
