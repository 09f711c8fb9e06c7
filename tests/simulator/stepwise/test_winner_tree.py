"""Tournament trees against the least of a list."""

import math

import numpy as np
import pytest

from simulator.stepwise.winner_tree import change, key_of, new_trees


@pytest.mark.parametrize("workers", [1, 2, 4, 5, 17, 1000])
def test_the_root_has_the_least_key_after_any_changes(workers: int) -> None:
    dice = np.random.default_rng(workers)
    trees, keys = new_trees(2, workers), [math.inf] * workers
    for _ in range(500):
        worker = int(dice.integers(workers))
        keys[worker] = math.inf if dice.random() < 0.3 else float(dice.integers(20))
        change(1, worker, keys[worker], trees)
        assert trees["key"][1, 0] == min(keys)
        assert keys[trees["worker"][1, 0]] == min(keys)
        assert key_of(1, worker, trees) == keys[worker]
    assert trees["key"][0, 0] == math.inf
