"""A minute of chaos, always of the same seed. `make test` leaves the test out until the known defects are mended."""

import tempfile
import time
from collections.abc import Iterator
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


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path, because a Unix socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        yield Path(name)


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_minute_of_faults_costs_no_exact_answer(folder: Path) -> None:
    end_s = time.monotonic() + SECONDS
    game = Game(
        SEED, ("mock",), folder, lambda number: number < 40 and time.monotonic() < end_s, print, 0, tuple(KNOWN)
    )
    tally = await game.play()
    assert tally.failures == []
    assert tally.rounds >= 3
