"""Feeds each target its corpus, its seeds, cut and changed forms of them, and random bytes. FUZZ_SECONDS: for all."""

import os
import random
import time
from pathlib import Path

import pytest

from tests.fuzz.changed_bytes import changed
from tests.fuzz.targets import TARGETS, Target

CORPUS = Path(__file__).parent / "corpus"  # CORPUS/TARGET/*: input that was once refused wrongly
SECONDS = float(os.environ.get("FUZZ_SECONDS", "15"))
DRAWN = 0.7  # of the inputs of targets that draw some
SHOWN = 4000  # bytes of an input
CASES = [
    pytest.param(one, id=one.name, marks=[pytest.mark.xfail(strict=True, reason=one.known)] if one.known else [])
    for one in TARGETS
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(int(SECONDS) + 120)
@pytest.mark.parametrize("target", CASES)
def test_what_is_malformed_is_refused_in_one_of_the_ways_that_callers_expect(target: Target) -> None:
    kept = [path.read_bytes() for path in sorted((CORPUS / target.name.replace(" ", "-")).glob("*"))]
    for data in (*kept, *target.seeds):
        feed(target, data)
    chance = random.Random(target.name)
    end_s = time.monotonic() + SECONDS / len(TARGETS)
    while time.monotonic() < end_s:
        if target.draw is not None and chance.random() < DRAWN:
            feed(target, target.draw(chance))
        else:
            feed(target, changed(chance, chance.choice((b"", *kept, *target.seeds))))


def feed(target: Target, data: bytes) -> None:
    try:
        target.feed(data)
    except target.allowed:
        pass
    except Exception as error:
        raise AssertionError(f"{target.name}: {error!r}; put this into tests/fuzz/corpus: {data[:SHOWN]!r}") from error
