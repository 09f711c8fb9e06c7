"""Numbers for workers, so that facts about workers can be columns."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from runtime.discovery.worker_key import WorkerKey

NOBODY = -1  # the number of an unknown worker
REMEMBERED = 8  # tuples of workers whose numbers are kept


class Roster:
    """Small numbers from 0. A number is used again when its worker has left."""

    def __init__(self) -> None:
        self.names: list[WorkerKey] = []  # by number; stale where a worker has left
        self._numbers: dict[WorkerKey, int] = {}
        self._free: list[int] = []
        self._asked: dict[int, tuple[tuple[WorkerKey, ...], NDArray[np.intp]]] = {}  # by identity of the tuple

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[WorkerKey]:
        return iter(self._numbers)

    def get(self, worker: WorkerKey) -> int | None:
        return self._numbers.get(worker)

    def add(self, worker: WorkerKey) -> int:
        """The worker's number; a new one when it has none."""
        number = self._numbers.get(worker)
        if number is None:
            self._asked.clear()
            number = self._numbers[worker] = self._take_number(worker)
        return number

    def _take_number(self, worker: WorkerKey) -> int:
        number = self._free.pop() if self._free else len(self.names)
        self.names[number : number + 1] = [worker]
        return number

    def discard(self, worker: WorkerKey) -> None:
        number = self._numbers.pop(worker, None)
        if number is not None:
            self._asked.clear()
            self._free.append(number)

    def numbers(self, workers: tuple[WorkerKey, ...]) -> NDArray[np.intp]:
        """[n] -> [n], NOBODY for workers without a number. Fast for a tuple that was asked for before."""
        asked = self._asked.get(id(workers))
        if asked is None:
            if len(self._asked) >= REMEMBERED:
                self._asked.clear()
            numbers = np.array([self._numbers.get(worker, NOBODY) for worker in workers], dtype=np.intp)
            asked = self._asked[id(workers)] = (workers, numbers)  # keeping the tuple keeps its identity
        return asked[1]
