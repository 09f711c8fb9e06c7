"""Lines that strangers can cause as often as they like."""

import logging
import subprocess
import sys
from pathlib import Path

from baton.service.local.child_process import environment
from runtime.sparing import MAX_KINDS, PERIOD_S, Sparing, SparingFilter

FLOOD = """
import asyncio, sys
from pathlib import Path
from router.api.serving.grpc_api import GrpcApi
from tests.fuzz.doors.http2_frames import END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, frame, literal
from tests.router.operator_questions import make_questions
from tests.router.scripted_generator import ScriptedGenerator, make_frontend, tiny_tokenizer

NAMES = [(":method", "POST"), (":scheme", "http"), (":path", "/nothing/Here"), (":authority", "b")]
WRONG = [("te", "x"), ("grpc-timeout", "x"), ("grpc-encoding", "x"), ("grpc-status", "x"), ("content-type", "y")]
HEAD = b"".join(literal(*field) for field in NAMES + WRONG)

async def flood():
    api = GrpcApi(make_frontend(ScriptedGenerator(tiny_tokenizer(Path(sys.argv[1])))), make_questions(lambda: None))
    port = await api.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    said = [frame(HEADERS, END_HEADERS | END_STREAM, 2 * number + 1, HEAD) for number in range(100)]
    writer.write(PREFACE + frame(SETTINGS, 0, 0, b"") + b"".join(said))
    for _ in range(100):  # answers and resets: the headers have been read
        await reader.readexactly(1)
    writer.close()
    await api.stop()

asyncio.run(flood())
"""


def test_so_many_lines_of_a_kind_are_written_and_the_next_says_how_many_were_not() -> None:
    now_s, lines = 0.0, []
    spare = Sparing(2, lambda: now_s)

    def write(event: str, **fields: object) -> None:
        lines.append((event, fields))

    for _ in range(5):
        spare(write, "refused", reason="x")
    spare(write, "refused", kind="10.0.0.1", reason="y")
    assert lines == [("refused", {"reason": "x"})] * 2 + [("refused", {"reason": "y"})]
    now_s = PERIOD_S
    spare(write, "refused", reason="x")
    spare(write, "refused", reason="x")
    assert lines[3:] == [("refused", {"reason": "x", "lines_left_out": 3}), ("refused", {"reason": "x"})]
    for number in range(10 * MAX_KINDS):
        spare.take(number)
    assert len(spare._kinds) == MAX_KINDS


def test_libraries_that_speak_with_strangers_are_spared_and_others_are_not() -> None:
    sieve = SparingFilter(2, ["asyncio"])
    records = [logging.LogRecord(name, logging.WARNING, "", 0, "x", (), None) for name in ("asyncio", "nats")]
    assert [[sieve.filter(record) for _ in range(3)] for record in records] == [[True, True, False], [True] * 3]


def test_a_flood_of_malformed_headers_writes_no_lines(tiny_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FLOOD, str(tiny_model)], env=environment(1), capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
