"""A minute of chaos, always of the same seed."""

import time
from pathlib import Path

import pytest

from tests.chaos.rounds import Game

SEED = 16
SECONDS = 60.0  # and the time to start and to end


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_minute_of_faults_costs_no_exact_answer(folder: Path) -> None:
    end_s = time.monotonic() + SECONDS
    game = Game(SEED, ("mock",), folder, lambda number: number < 40 and time.monotonic() < end_s, print)
    tally = await game.play()
    assert tally.failures == []
    assert tally.rounds >= 3
