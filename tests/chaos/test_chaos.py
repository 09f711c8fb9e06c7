"""A minute of chaos in CI, always of the same seed."""

import time
from pathlib import Path

import pytest

from tests.chaos.rounds import Game

SEED = 16
# Left out until the product bears them; `make chaos` strikes with them nonetheless.
KNOWN = {
    "few threads": "a prefill worker that cannot start a link's thread leaks the blocks of the prompt",
    "little memory": "the same: a thread needs address space",
    "few descriptors": "a worker's first block hash imports a module, which ends the engine loop",
    "no file grows": "a log line that cannot be written ends what was logging",
    "full disk": "a log line that cannot be written ends what was logging",
}
SECONDS = 45.0  # and the time to start and to end


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_minute_of_faults_costs_no_exact_answer(tmp_path: Path) -> None:
    end_s = time.monotonic() + SECONDS
    game = Game(
        SEED, ("mock",), tmp_path, lambda number: number < 40 and time.monotonic() < end_s, print, 0, tuple(KNOWN)
    )
    tally = await game.play()
    assert tally.failures == []
    assert tally.rounds >= 3
