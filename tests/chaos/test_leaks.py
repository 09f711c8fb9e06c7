"""What counts as left behind, of threads."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace

from tests.chaos.judging.leaks import MORE_THREADS, POOL, POOL_THREADS, Look, growth, look
from tests.chaos.service.fleet import Fleet

US = ("router-1", os.getpid())
FLEET: Fleet = SimpleNamespace(members={US[0]: SimpleNamespace(name=US[0], pid=US[1])})  # type: ignore[assignment]


def test_threads_of_grpc_are_told_from_ours() -> None:
    seen: list[Look] = []

    def work() -> None:
        (before,) = look(FLEET, 0)
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(POOL)
        seen.extend((before, *look(FLEET, 1)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    before, after = seen
    assert (after.threads, after.pool_threads) == (before.threads - 1, before.pool_threads + 1)


def test_threads_of_grpc_may_be_as_many_as_attackers_keep_at_work() -> None:
    few = Look(US, 0, 9, 9, 0, 4)
    assert growth([few, Look(US, 1, 9, 9 + MORE_THREADS, 0, POOL_THREADS)]).problems == []
    for more in (Look(US, 1, 9, 10 + MORE_THREADS, 0, 4), Look(US, 1, 9, 9, 0, POOL_THREADS + 1)):
        (problem,) = growth([few, more]).problems
        assert "threads" in problem
