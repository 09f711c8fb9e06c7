"""Recordings of an event stream as files; docs/events.md describes the format for other readers.

A file is a magic, a version, and blocks: length, CRC-32, zlib data. A block holds a list of frames. Because each block
can be read by itself, a recording whose writer was killed is good up to its last whole block.
"""

import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import msgspec
import numpy as np
from msgspec import Struct

from baton_proto.decoding import decoder
from baton_proto.discovery import WorkerRecord
from baton_proto.kv_events import KvEvent, Stored
from runtime.blocks.block_hash import sequence_hashes
from runtime.errors import ConfigError

MAGIC = b"BATONREC"
VERSION = 2  # 1 has no homes of blocks
BLOCK_BYTES = 256 * 1024  # about, of frames before compression
BLOCK_S = 1.0  # at most this much is lost when the writer is killed
MAX_BLOCK_BYTES = 64 * 1024 * 1024
COMPRESSION_LEVEL = 1  # most of the bytes are hashes, which no effort makes smaller

_FILE_HEADER = struct.Struct("<8sH")
_BLOCK_HEADER = struct.Struct("<II")  # bytes of zlib data, their CRC-32


class Started(Struct, frozen=True, array_like=True, tag="start"):
    """First frame of every recording."""

    time_s: float  # Unix time, here and below
    namespace: str


class Announced(Struct, frozen=True, array_like=True, tag="announced"):
    """A worker was found, or its record has changed."""

    time_s: float
    record: WorkerRecord


class Left(Struct, frozen=True, array_like=True, tag="left"):
    time_s: float
    worker_id: str
    incarnation: int


class Base(Struct, frozen=True, array_like=True, tag="base"):
    """A part of the blocks that a worker held when the recording began: batches up to `event_id` are contained."""

    time_s: float
    worker_id: str
    incarnation: int
    event_id: int
    runs: list[Stored]  # parents before children
    last: bool


class Batch(Struct, frozen=True, array_like=True, tag="batch"):
    """A KvEventBatch."""

    time_s: float  # when JetStream stored it
    worker_id: str
    incarnation: int
    event_id: int
    timestamp_s: float  # the publisher's
    events: list[KvEvent]


class Ended(Struct, frozen=True, array_like=True, tag="end"):
    """Last frame of a recording that was ended in order."""

    time_s: float


Frame = Started | Announced | Left | Base | Batch | Ended

_encoder = msgspec.msgpack.Encoder()
_decode = decoder(list[Frame])


class RecordingWriter:
    """A context manager. Creates the file; raises ConfigError when there is one already."""

    def __init__(self, path: Path, namespace: str) -> None:
        try:
            self._file: BinaryIO = path.open("xb")
        except FileExistsError as error:
            raise ConfigError(str(path), "exists already; a recording is never overwritten") from error
        except OSError as error:
            raise ConfigError(str(path), error.strerror or str(error)) from error
        self._frames: list[bytes] = []
        self._frames_bytes = 0
        self._since_s = time.monotonic()
        self.bytes_written = self._file.write(_FILE_HEADER.pack(MAGIC, VERSION))
        self.write(Started(time.time(), namespace))
        self.flush()

    def write(self, frame: Frame) -> None:
        """Adds a frame, which reaches the disk with the next `flush`."""
        data = _encoder.encode(_with_events(frame, _shortened))
        self._frames.append(data)
        self._frames_bytes += len(data)
        if self._frames_bytes >= BLOCK_BYTES:
            self.flush()

    def flush_if_due(self) -> None:
        if self._frames and time.monotonic() - self._since_s > BLOCK_S:
            self.flush()

    def flush(self) -> None:
        """Ends the block. From then on it survives the end of this process, though not of the machine."""
        self._since_s = time.monotonic()
        if not self._frames:
            return
        data = zlib.compress(_array_header(len(self._frames)) + b"".join(self._frames), COMPRESSION_LEVEL)
        try:
            self._file.write(_BLOCK_HEADER.pack(len(data), zlib.crc32(data)) + data)
            self._file.flush()
        except OSError as error:
            raise ConfigError(self._file.name, error.strerror or str(error)) from error
        self.bytes_written += _BLOCK_HEADER.size + len(data)
        self._frames.clear()
        self._frames_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._file:
            if kind is None:
                self.write(Ended(time.time()))
            self.flush()


class Recording:
    """A recording to be read. Raises ConfigError when the file is no recording, or of another version."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        self.ended_in_order = False  # known when all frames were read
        self.damage = ""  # what stopped the reading before the end of the file
        try:
            self.num_bytes = path.stat().st_size
            with path.open("rb") as file:
                self._check_header(file.read(_FILE_HEADER.size))
        except OSError as error:
            raise ConfigError(str(path), error.strerror or str(error)) from error

    def frames(self) -> Iterator[Frame]:
        """Yields all frames up to the end of the file, or to the last whole block before damage."""
        with self.path.open("rb") as file:
            file.seek(_FILE_HEADER.size)
            while (block := self._read_block(file)) is not None:
                for frame in block:
                    self.ended_in_order = isinstance(frame, Ended)
                    yield _with_events(frame, _restored)

    def _check_header(self, header: bytes) -> None:
        if len(header) < _FILE_HEADER.size or not header.startswith(MAGIC):
            raise ConfigError(str(self.path), "is not a recording of events")
        version = _FILE_HEADER.unpack(header)[1]
        if not 1 <= version <= VERSION:
            reads = f"this program reads up to {VERSION}"
            raise ConfigError(str(self.path), f"has version {version} of the format; {reads}")

    def _read_block(self, file: BinaryIO) -> list[Frame] | None:
        self.bytes_read = file.tell()
        header = file.read(_BLOCK_HEADER.size)
        if not header:
            return None
        self.damage = f"a block at byte {self.bytes_read} is cut off or damaged"
        if len(header) < _BLOCK_HEADER.size:
            return None
        length, checksum = _BLOCK_HEADER.unpack(header)
        if length > MAX_BLOCK_BYTES:
            return None
        data = file.read(length)
        if len(data) < length or zlib.crc32(data) != checksum:
            return None
        try:
            frames: list[Frame] = _decode(zlib.decompress(data))
        except (zlib.error, msgspec.DecodeError) as error:
            self.damage += f": {error}"
            return None
        self.damage = ""
        return frames


def _array_header(length: int) -> bytes:
    """The head of a msgpack array of so many elements."""
    return b"\xdd" + length.to_bytes(4, "big")


def _with_events(frame: Frame, change: Callable[[KvEvent], KvEvent]) -> Frame:
    match frame:
        case Batch(events=events):
            return msgspec.structs.replace(frame, events=[change(event) for event in events])
        case Base(runs=runs):
            return msgspec.structs.replace(frame, runs=[change(run) for run in runs])
        case _:
            return frame


def _shortened(event: KvEvent) -> KvEvent:
    """The event without its sequence hashes (half of a recording) if they follow from parent and block hashes."""
    if isinstance(event, Stored) and event.sequence_hashes and _derivable(event) == event.sequence_hashes:
        return msgspec.structs.replace(event, sequence_hashes=b"")
    return event


def _restored(event: KvEvent) -> KvEvent:
    if isinstance(event, Stored) and not event.sequence_hashes:
        return msgspec.structs.replace(event, sequence_hashes=_derivable(event))
    return event


def _derivable(run: Stored) -> bytes:
    """Empty when there are no whole hashes to derive from."""
    if len(run.block_hashes) % 8:
        return b""
    return sequence_hashes(np.frombuffer(run.block_hashes, dtype="<u8"), run.parent).tobytes()
