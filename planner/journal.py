"""The journal: one line of JSON per start of a planner, per decision and per effect that has ended."""

import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from baton_proto.decoding import decoder
from baton_proto.planner import MAJOR, Observation, Role, Target, Verb
from baton_proto.planner_control import Order, Release, Scale
from baton_proto.version import check_major
from runtime.errors import ConfigError
from runtime.own_files import open_file

JOURNAL_BYTES: Final = 256_000_000  # weeks of decisions; it and the one before it are kept


class Started(Struct, frozen=True, tag="started"):
    """The first line that a planner writes."""

    time_s: float
    version: int
    policy: str


class Decided(Struct, frozen=True, tag="decided"):
    time_s: float
    observation: Observation
    target: Target
    duration_ms: float  # of deciding
    advice_only: bool = False  # True: the actions were not carried out


class EffectEnded(Struct, frozen=True, tag="effect"):
    time_s: float
    verb: Verb
    worker_id: str
    role: Role
    began_s: float
    duration_s: float
    error: str = ""  # empty: it succeeded


class Ordered(Struct, frozen=True, tag="ordered"):
    """What an operator has ordered, and with which key."""

    time_s: float
    order: Scale | Release | Order
    by: str


class Swapped(Struct, frozen=True, tag="swapped"):
    """A model was asked for while it slept, and others fell asleep for it."""

    time_s: float
    model: str
    asleep: list[str]  # who fell asleep
    reason: str  # why they; empty: there was room
    duration_s: float
    error: str = ""  # empty: it is awake


Line = Started | Decided | EffectEnded | Ordered | Swapped

_encoder = msgspec.json.Encoder()
_decode = decoder(Line, json=True)


class Journal:
    """Appends lines. A file that has reached `max_bytes` is renamed to NAME.1. The constructor raises ConfigError when
    the file cannot be opened."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        try:
            self._file = _appended(path)
        except OSError as error:
            raise ConfigError(str(path), error.strerror or str(error)) from error

    def write(self, line: Line) -> None:
        """Raises OSError."""
        self._file.write(_encoder.encode(line) + b"\n")
        if self._file.tell() >= self._max_bytes:
            self._file.close()
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._file = _appended(self._path)

    def close(self) -> None:
        self._file.close()


def _appended(path: Path) -> FileIO:
    """Unbuffered, one write per line: a killed planner leaves whole lines. Raises OSError."""
    return FileIO(open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, taboo=0, mode=0o644), "ab")


def read_journal(path: Path) -> Iterator[Line]:
    """Yields the lines, without a last one that is cut off. Raises ConfigError with the number of a malformed line."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                yield _read(line, f"{path}:{number}")
    except OSError as error:
        raise ConfigError(str(path), error.strerror or str(error)) from error


def _read(data: bytes, where: str) -> Line:
    try:
        line: Line = _decode(data)
        if isinstance(line, Started):
            check_major("journal", line.version, MAJOR)
        if isinstance(line, Decided):
            check_major("observation", line.observation.version, MAJOR)
            check_major("target", line.target.version, MAJOR)
    except msgspec.DecodeError as error:
        raise ConfigError(where, f"is no line of a planner's journal: {error}") from error
    return line
