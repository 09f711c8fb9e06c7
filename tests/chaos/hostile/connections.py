"""Attacks by connections alone: many, slow, silent, or of frames that mean nothing."""

import asyncio
import contextlib
import struct
from collections.abc import Awaitable, Callable

from tests.chaos.hostile.stranger import FEW_BYTES, PAUSE_S, Lines, Stranger, connected
from tests.fuzz.doors.http2_frames import (
    CONTINUATION,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    frame,
    literal,
)

IDLE = 1100
SLOW = 200
STUCK = 40
STEP_S = 0.2  # between two bytes of who is slow
HOLD_S = 3600.0
ACK = 1
FIELD = literal("x" * 100, "y" * 3900)

Talk = Callable[[Lines], Awaitable[None]]


async def _kept_up(address: tuple[str, int], count: int, talk: Talk, buffer_bytes: int = 0) -> None:
    """Keeps so many connections open at once; one that ends is made again."""

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError, EOFError):
                async with connected(address, buffer_bytes) as lines:
                    await talk(lines)
            await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*(one() for _ in range(count)))


async def _until_closed(lines: Lines) -> None:
    while await lines[0].read(65536):
        pass


async def idle(stranger: Stranger) -> None:
    await _kept_up(stranger.http, IDLE, _until_closed)


async def _agree(lines: Lines) -> None:
    """Agrees to the service's settings, because gRPC soon cuts off who does not."""
    lines[1].write(PREFACE + frame(SETTINGS, 0, 0, b""))
    await lines[0].read(65536)
    lines[1].write(frame(SETTINGS, ACK, 0, b""))


async def idle_channels(stranger: Stranger) -> None:
    """Connections for gRPC on which no call is made."""

    async def greet(lines: Lines) -> None:
        await _agree(lines)
        await _until_closed(lines)

    await _kept_up(stranger.grpc, IDLE, greet)


async def _trickle(lines: Lines, data: bytes) -> None:
    for at in range(len(data)):
        lines[1].write(data[at : at + 1])
        await lines[1].drain()
        await asyncio.sleep(STEP_S)


async def slow_heads(stranger: Stranger) -> None:
    head = stranger.head("POST", "/v1/completions")
    await _kept_up(stranger.http, SLOW, lambda lines: _trickle(lines, head))


async def slow_bodies(stranger: Stranger) -> None:
    head = stranger.head("POST", "/v1/completions", {"Content-Length": "8000000"}) + b"\r\n"

    async def talk(lines: Lines) -> None:
        lines[1].write(head + b'{"prompt": "' + b"a" * 60_000)
        await _trickle(lines, b"a" * 10_000)

    await _kept_up(stranger.http, SLOW, talk)


async def stuck_viewers(stranger: Stranger) -> None:
    """They ask for the live page's events and for large answers, and read nothing."""
    paths = ("/ui/events", "/ui", "/metrics", "/openapi.json")
    data = b"".join(stranger.head("GET", path) + b"\r\n" for path in paths * 4)

    async def talk(lines: Lines) -> None:
        lines[1].write(data)
        lines[1].transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(HOLD_S)

    await _kept_up(stranger.http, STUCK, talk, FEW_BYTES)


async def unread_answers(stranger: Stranger) -> None:
    body = {"prompt": "a", "max_tokens": 1000, "n": 2, "stream": True, "ignore_eos": True, "logprobs": 5}
    data = stranger.posted("/v1/completions", body)

    async def talk(lines: Lines) -> None:
        lines[1].write(data)
        lines[1].transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(HOLD_S)

    await _kept_up(stranger.http, STUCK, talk, FEW_BYTES)


async def _flood(lines: Lines, data: bytes) -> None:
    reading = asyncio.ensure_future(_until_closed(lines))
    try:
        while not reading.done():
            lines[1].write(data)
            await lines[1].drain()
            await asyncio.sleep(0)
    finally:
        reading.cancel()


async def header_floods(stranger: Stranger) -> None:
    """Headers that do not end, fields that fill the table of HPACK, and fields that name it again and again."""
    endless = frame(HEADERS, 0, 1, FIELD) + frame(CONTINUATION, 0, 1, FIELD) * 400
    kept = b"\x40" + FIELD[1:]  # goes into the table
    bomb = kept + b"\xbe" * 12_000  # and is named from there
    calls = b"".join(frame(HEADERS, END_HEADERS | END_STREAM, stream, bomb) for stream in range(1, 41, 2))

    async def talk(lines: Lines) -> None:
        lines[1].write(PREFACE + frame(SETTINGS, 0, 0, b""))
        lines[1].write(calls)
        await _flood(lines, endless)

    await _kept_up(stranger.grpc, 16, talk)


async def endless_heads(stranger: Stranger) -> None:
    """One head after the other, by clients that never agree to how long it may be."""
    begun = PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, 0, 1, FIELD)

    async def talk(lines: Lines) -> None:
        lines[1].write(begun)
        await _flood(lines, frame(CONTINUATION, 0, 1, FIELD) * 100)

    await _kept_up(stranger.grpc, 32, talk)


async def resets(stranger: Stranger) -> None:
    """Calls that are given up as soon as they are made."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/baton.v1.Inference/Generate",
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    if stranger.who == "user":
        fields["authorization"] = f"Bearer {stranger.key}"
    head = b"".join(literal(name, value) for name, value in fields.items())

    async def talk(lines: Lines) -> None:
        await _agree(lines)
        calls = (
            frame(HEADERS, END_HEADERS, stream, head) + frame(RST_STREAM, 0, stream, struct.pack(">I", 8))
            for stream in range(1, 200_001, 2)
        )
        reading = asyncio.ensure_future(_until_closed(lines))
        try:
            for number, call in enumerate(calls):
                lines[1].write(call)
                if number % 100 == 0:
                    await lines[1].drain()
                    await asyncio.sleep(0)
                if reading.done():
                    return
        finally:
            reading.cancel()

    await _kept_up(stranger.grpc, 8, talk)
