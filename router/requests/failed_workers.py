"""The workers that a choice is not given to again, because they failed or refused it."""

from collections.abc import Callable

from runtime.discovery.worker_key import WorkerKey


class FailedWorkers:
    """`returns`: how often a worker has become ready again. Who falls asleep refuses requests, and takes them again
    when it is awake."""

    def __init__(self, returns: Callable[[WorkerKey], int]) -> None:
        self._returns = returns
        self._then: dict[WorkerKey, int] = {}

    def add(self, worker: WorkerKey) -> None:
        self._then[worker] = self._returns(worker)

    def now(self) -> frozenset[WorkerKey]:
        """Those that have not become ready again since."""
        return frozenset(worker for worker, then in self._then.items() if self._returns(worker) == then)
