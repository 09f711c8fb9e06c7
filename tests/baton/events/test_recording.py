"""The file format of recordings: what is written is read, and damage costs no more than what it hit."""

import signal
import subprocess
import sys
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.events.recording import Announced, Base, Batch, Ended, Frame, Left, Recording, RecordingWriter, Started
from baton_proto.discovery import TransferEndpoint, WorkerRecord
from baton_proto.kv_events import HOST, Cleared, Moved, Removed, Stored
from runtime.blocks.block_hash import sequence_hashes
from runtime.errors import ConfigError
from tests.router.indexed_cluster import removed, stored

RECORD = WorkerRecord(
    1,
    "decode-1",
    7,
    "decode",
    "ready",
    "127.0.0.1:1",
    TransferEndpoint("h", "/x", "127.0.0.1:2"),
    "m",
    "h",
    16,
    9,
    99,
    1,
)
FRAMES: list[Frame] = [
    Announced(1.0, RECORD),
    Base(1.5, "decode-1", 7, 3, [stored([1, 2]), stored([1, 2, 3], known=2)], last=True),
    Batch(2.0, "decode-1", 7, 4, 1.9, [stored([5]), removed([1, 2, 3], kept=2), Cleared()]),
    Left(3.0, "decode-1", 7),
]


def write(path: Path, frames: list[Frame] = FRAMES, blocks: int = 1) -> None:
    with RecordingWriter(path, "default") as writer:
        for frame in frames:
            writer.write(frame)
            if blocks > 1:
                writer.flush()


def block_starts(path: Path) -> list[int]:
    """Read by the documented format, without the code under test."""
    data, position, starts = path.read_bytes(), 10, []
    while position < len(data):
        starts.append(position)
        position += 8 + int.from_bytes(data[position : position + 4], "little")
    assert position == len(data)
    return starts


def test_frames_are_read_as_they_were_written(tmp_path: Path) -> None:
    write(tmp_path / "a")
    recording = Recording(tmp_path / "a")
    started, *frames, ended = recording.frames()
    assert isinstance(started, Started)
    assert started.namespace == "default"
    assert frames == FRAMES
    assert isinstance(ended, Ended)
    assert recording.ended_in_order
    assert not recording.damage


def test_the_file_is_as_documented(tmp_path: Path) -> None:
    """docs/events.md, followed by hand."""
    write(tmp_path / "a")
    data = (tmp_path / "a").read_bytes()
    assert data[:10] == b"BATONREC\x02\x00"
    frames = []
    for start in block_starts(tmp_path / "a"):
        length, checksum = (int.from_bytes(data[start + i : start + i + 4], "little") for i in (0, 4))
        block = data[start + 8 : start + 8 + length]
        assert zlib.crc32(block) == checksum
        frames += msgspec.msgpack.decode(zlib.decompress(block))
    assert [frame[0] for frame in frames] == ["start", "announced", "base", "batch", "left", "end"]
    batch = frames[3]
    assert batch[1:6] == [2.0, "decode-1", 7, 4, 1.9]
    run = batch[6][0]
    assert run["type"] == "stored"
    assert run["sequence_hashes"] == b""
    assert len(run["block_hashes"]) == 8


def test_sequence_hashes_that_do_not_follow_from_the_block_hashes_are_kept(tmp_path: Path) -> None:
    odd = Batch(
        1.0, "w", 1, 1, 1.0, [Stored(None, bytes(8), b"otherwis"), Stored(None, b"", b""), Removed(b"12345678")]
    )
    write(tmp_path / "a", [odd])
    assert list(Recording(tmp_path / "a").frames())[1] == odd


def test_recordings_of_the_first_version_are_read(tmp_path: Path) -> None:
    write(tmp_path / "a")
    data = (tmp_path / "a").read_bytes()
    (tmp_path / "b").write_bytes(data.replace(b"BATONREC\x02", b"BATONREC\x01", 1))
    assert list(Recording(tmp_path / "b").frames()) == list(Recording(tmp_path / "a").frames())


def test_homes_are_recorded(tmp_path: Path) -> None:
    blocks = np.arange(3, dtype=np.uint64)
    stored = Stored(None, blocks.tobytes(), sequence_hashes(blocks).tobytes(), HOST)
    batch = Batch(1.0, "w", 1, 1, 1.0, [stored, Moved(bytes(8), HOST)])
    write(tmp_path / "a", [batch])
    assert list(Recording(tmp_path / "a").frames())[1] == batch


def test_stored_blocks_take_half_of_their_size_on_the_wire(tmp_path: Path) -> None:
    blocks = np.random.default_rng(0).integers(2**64, size=100_000, dtype=np.uint64)
    run = Stored(None, blocks.tobytes(), sequence_hashes(blocks).tobytes())
    write(tmp_path / "a", [Batch(1.0, "w", 1, 1, 1.0, [run])])
    assert (tmp_path / "a").stat().st_size < 8.2 * len(blocks)
    assert list(Recording(tmp_path / "a").frames())[1].events == [run]  # type: ignore[union-attr]


@pytest.mark.parametrize("cut", [1, 4, 9, 20])
def test_a_cut_off_recording_is_good_up_to_its_last_whole_block(tmp_path: Path, cut: int) -> None:
    write(tmp_path / "a", blocks=5)
    data = (tmp_path / "a").read_bytes()
    last = block_starts(tmp_path / "a")[-2]  # the frame `left`; `end` has a block of its own
    (tmp_path / "b").write_bytes(data[: last + cut])
    recording = Recording(tmp_path / "b")
    assert list(recording.frames())[1:] == FRAMES[:-1]
    assert not recording.ended_in_order
    assert str(last) in recording.damage


def test_a_damaged_block_ends_the_reading_and_is_told(tmp_path: Path) -> None:
    write(tmp_path / "a", blocks=5)
    data = bytearray((tmp_path / "a").read_bytes())
    data[block_starts(tmp_path / "a")[2] + 12] ^= 1
    (tmp_path / "b").write_bytes(data)
    recording = Recording(tmp_path / "b")
    assert list(recording.frames())[1:] == FRAMES[:1]
    assert recording.damage


def test_a_killed_writer_leaves_what_it_flushed(tmp_path: Path) -> None:
    program = """
import sys, time
from pathlib import Path
from baton.events.recording import Batch, RecordingWriter
from baton_proto.kv_events import Cleared
with RecordingWriter(Path(sys.argv[1]), "default") as writer:
    for number in range(1, 101):
        writer.write(Batch(1.0, "w", 1, number, 1.0, [Cleared()]))
    writer.flush()
    writer.write(Batch(1.0, "w", 1, 101, 1.0, [Cleared()]))
    print("written", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "a")], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        writer.send_signal(signal.SIGKILL)
    recording = Recording(tmp_path / "a")
    ids = [frame.event_id for frame in recording.frames() if isinstance(frame, Batch)]
    assert ids == list(range(1, 101))
    assert not recording.ended_in_order
    assert not recording.damage


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a recording"),
        (b"BATONREC", "not a recording"),
        (b"PK\x03\x04 something else", "not a recording"),
        (b"BATONREC\x00\x00", "version 0"),
        (b"BATONREC\x03\x00", "version 3"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        Recording(tmp_path / "a")


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Recording(tmp_path / "nothing")


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("precious")
    with pytest.raises(ConfigError, match="never overwritten"):
        RecordingWriter(tmp_path / "a", "default")
    assert (tmp_path / "a").read_text() == "precious"
