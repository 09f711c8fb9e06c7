"""Rules that choose workers, to compare placement with: all see what the router sees, and nothing else."""

import itertools
import math
import random
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from router.placement.candidates import Candidates, Request
from router.placement.placement import weigh
from router.placement.weights import Weights

Floats = NDArray[np.float64]


class Question(NamedTuple):
    """One request and the workers that it may go to. `prefill` is NO_CANDIDATES in a mixed fleet."""

    request: Request
    prefill: Candidates
    decode: Candidates
    due_ms: float = math.inf  # when the first token is due, from now on


class Answer(NamedTuple):
    """Indices of candidates."""

    decode: int | None  # None: the prefill worker keeps the answer
    prefill: int | None  # None: the decode worker runs the prompt


class Policy(Protocol):
    def choose(self, question: Question) -> Answer: ...


MakePolicy = Callable[[random.Random], Policy]


class Placed:
    """The router's own placement."""

    def __init__(self, config: Weights, dice: random.Random) -> None:
        self._config, self._dice = config, dice

    def choose(self, question: Question) -> Answer:
        request, prefill, decode, due_ms = question
        weighing = weigh(request, decode, prefill, self._config, self._dice, due_ms=due_ms)
        placement = weighing.placement()
        if placement is None:  # all are full; in a service the request would wait in the router's queue
            return Answer(_cheapest(decode.load[:, 2], self._dice), _cheapest(prefill.load[:, 1], self._dice))
        if weighing.keeps:
            return Answer(None, weighing.prefill.keeper)
        return Answer(weighing.decode.chosen, weighing.prefill.chosen if placement.prefill else None)


class Turns:
    """Round robin."""

    def __init__(self, dice: random.Random) -> None:
        self._turns = itertools.count()

    def choose(self, question: Question) -> Answer:
        turn, prefills = next(self._turns), len(question.prefill.workers)
        return Answer(turn % len(question.decode.workers), turn % prefills if prefills else None)


class Weighted:
    """The cost that Dynamo's router minimises, in blocks: prefill * (prompt - overlap * cached + queued) + load *
    active, without the prompt, which is the same for all. A decode worker beside prefill workers is chosen by its load
    alone."""

    def __init__(self, prefill: float, overlap: float, load: float, dice: random.Random) -> None:
        self._weights, self._dice = (prefill, overlap, load), dice

    def choose(self, question: Question) -> Answer:
        prefill, overlap, load = self._weights
        size = question.request.block_size

        def cost(workers: Candidates, load: float) -> Floats:
            computed = workers.load[:, 1] / size - overlap * workers.cached
            total: Floats = prefill * computed + load * workers.load[:, 2]
            return total

        if not question.prefill.workers:
            return Answer(_cheapest(cost(question.decode, load), self._dice), None)
        return Answer(
            _cheapest(question.decode.load[:, 2], self._dice), _cheapest(cost(question.prefill, 0.0), self._dice)
        )


class LeastLoaded:
    """Fewest requests; the worker's cache does not count."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice

    def choose(self, question: Question) -> Answer:
        decode = _cheapest(question.decode.load[:, 0], self._dice)
        if not question.prefill.workers:
            return Answer(decode, None)
        return Answer(decode, _cheapest(question.prefill.load[:, 1], self._dice))


class LongestPrefix:
    """Chooses the worker that has most cached; the load decides between equals alone."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice

    def choose(self, question: Question) -> Answer:
        decode = _cheapest(question.decode.load[:, 0], self._dice)
        runs = question.prefill if question.prefill.workers else question.decode
        column = 1 if question.prefill.workers else 0
        best = np.where(runs.cached == runs.cached.max(), runs.load[:, column], np.iinfo(np.int64).max)
        chosen = _cheapest(best, self._dice)
        return Answer(decode, chosen) if question.prefill.workers else Answer(chosen, None)


def _cheapest(costs: NDArray[np.float64] | NDArray[np.int64], dice: random.Random) -> int:
    return int(dice.choice(np.flatnonzero(costs == costs.min())))
