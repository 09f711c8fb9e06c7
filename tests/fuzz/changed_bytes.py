"""Bytes that are almost what they were."""

import random

MOST_BYTES = 2000
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


def changed(chance: random.Random, data: bytes) -> bytes:
    """Some bytes of it replaced, removed or added."""
    for _ in range(chance.randint(1, 6)):
        start = chance.randint(0, len(data))
        end = start + chance.choice((0, 0, 1, 4, len(data)))
        piece = chance.choice((chance.randbytes(chance.randint(0, 12)), chance.choice(PIECES), data[start:end]))
        data = data[:start] + piece + data[end:]
    return data[:MOST_BYTES]
