"""A minute of chaos, always of the same seeds: half of it with simulated workers, half with workers that compute, whose
KV moves between their tiers all the time."""

import time
from pathlib import Path

import pytest

from tests.chaos.rounds import Game

SECONDS = 27.0  # each, and the time to start and to end


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("scenario", "seed"), [("mock", 16), ("shm", 17)])
async def test_a_minute_of_faults_costs_no_exact_answer(folder: Path, scenario: str, seed: int) -> None:
    end_s = time.monotonic() + SECONDS
    game = Game(seed, (scenario,), folder, lambda number: number < 40 and time.monotonic() < end_s, print)
    tally = await game.play()
    assert tally.failures == []
    assert tally.rounds
