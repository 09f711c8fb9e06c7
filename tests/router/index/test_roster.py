"""Numbers of workers, against the obvious way of looking them up."""

import numpy as np
from hypothesis import given, strategies as st

from router.index.roster import NOBODY, REMEMBERED, Roster
from runtime.discovery.worker_key import WorkerKey

ALL: tuple[WorkerKey, ...] = tuple((f"w{i}", 1) for i in range(12))
groups = [ALL, ALL[::-1], *(ALL[i:] for i in range(REMEMBERED))]


@given(st.lists(st.tuples(st.sampled_from(["add", "discard"]), st.sampled_from(ALL)), max_size=60))
def test_groups_are_numbered_as_their_workers_come_and_go(steps: list[tuple[str, WorkerKey]]) -> None:
    roster = Roster()
    there: set[WorkerKey] = set()
    most = 0
    for action, worker in steps:
        if action == "add":
            number = roster.add(worker)
            assert roster.names[number] == worker
            there.add(worker)
        else:
            roster.discard(worker)
            there.discard(worker)
        most = max(most, len(there))
        assert set(roster) == there
        numbers = {worker: roster.get(worker) for worker in there}
        assert len(set(numbers.values())) == len(there), "no number is given twice"
        for group in groups:
            expected = [numbers.get(worker, NOBODY) for worker in group]
            assert roster.numbers(group).tolist() == expected
            assert roster.numbers(tuple(group)).tolist() == expected
    assert len(roster.names) == most, "a number that is free is used again"


def test_a_group_that_is_gone_is_not_taken_for_one_in_its_place() -> None:
    """Tuples are remembered by their identity, which another one may get when they are freed."""
    roster = Roster()
    for worker in ALL:
        roster.add(worker)
    rng = np.random.default_rng(0)
    for _ in range(2000):
        order = rng.permutation(len(ALL))
        assert (roster.numbers(tuple(ALL[i] for i in order)) == order).all()
