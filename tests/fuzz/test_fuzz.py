"""Feeds each target its corpus, its seeds, cut and changed forms of them, and random bytes. FUZZ_SECONDS: for all."""

import os
import random
import time
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS, Target

CORPUS = Path(__file__).parent / "corpus"  # CORPUS/TARGET/*: input that was once refused wrongly
SECONDS = float(os.environ.get("FUZZ_SECONDS", "15"))
MOST_BYTES = 2000
DRAWN = 0.7  # of the inputs of targets that draw some
SHOWN = 4000  # bytes of an input
PIECES = (
    b"\x00",
    b"\xff" * 8,
    b"[" * 3000,
    b"{{" * 50,
    b"9" * 400,
    b"-",
    b"\x93",
    b"\xdf\xff\xff\xff\xff",
    b"null",
    b": ",
)
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


def changed(chance: random.Random, data: bytes) -> bytes:
    """Some bytes of it replaced, removed or added."""
    for _ in range(chance.randint(1, 6)):
        start = chance.randint(0, len(data))
        end = start + chance.choice((0, 0, 1, 4, len(data)))
        piece = chance.choice((chance.randbytes(chance.randint(0, 12)), chance.choice(PIECES), data[start:end]))
        data = data[:start] + piece + data[end:]
    return data[:MOST_BYTES]
