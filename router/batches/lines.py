"""The lines of a batch: those that are asked for, and those that have been answered. What reads or writes here belongs
in a thread."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct

from router.batches.records import Counts, Fault, InputLine, OutputLine

MAX_LINES: Final = 50_000  # of a batch, as at OpenAI
MAX_FAULTS: Final = 100  # that are told of one file
CHUNK_LINES: Final = 64  # read at once: a fraction of a millisecond
CHUNK_BYTES: Final = 1 << 20
LINE_OVERHEAD: Final = 4096  # bytes of a line around its body

_read_line = msgspec.json.Decoder(InputLine).decode
encode_line = msgspec.json.Encoder().encode


class _Streamed(Struct, frozen=True):
    stream: Any = None


class _Answered(Struct, frozen=True):
    custom_id: str


class FileFaultError(Exception):
    """`fault`: why the whole file is refused."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(fault.message)


class ReadLine(NamedTuple):
    number: int
    num_bytes: int
    line: InputLine


class InputFile:
    """Reads a file from its beginning, some lines at a time."""

    def __init__(self, path: Path, max_body_bytes: int) -> None:
        """Raises OSError."""
        self._max_line = max_body_bytes + LINE_OVERHEAD
        self._number = 0
        self._file = path.open("rb")

    def take(self) -> list[tuple[int, bytes]]:
        """The next lines with their numbers; none at the end. Raises FileFaultError."""
        lines: list[tuple[int, bytes]] = []
        size = 0
        while size < CHUNK_BYTES and len(lines) < CHUNK_LINES and (line := self._file.readline(self._max_line + 1)):
            self._number += 1
            if len(line) > self._max_line:
                raise FileFaultError(Fault("line_too_long", f"has more than {self._max_line} bytes", self._number))
            if line.strip():
                lines.append((self._number, line))
            size += len(line)
        return lines

    def read(self) -> list[ReadLine]:
        """The next lines of a file that was checked."""
        return [ReadLine(number, len(data), _read_line(data)) for number, data in self.take()]

    def rewind(self) -> None:
        self._number = 0
        self._file.seek(0)

    def close(self) -> None:
        self._file.close()


class Checked:
    """What is known of a file when it was read."""

    def __init__(self, endpoint: str) -> None:
        self.faults: list[Fault] = []
        self._endpoint = endpoint
        self._ids: set[str] = set()

    @property
    def num_lines(self) -> int:
        return len(self._ids)

    def add(self, lines: Sequence[tuple[int, bytes]]) -> None:
        for number, data in lines:
            fault = self._fault(number, data)
            if fault is not None and len(self.faults) < MAX_FAULTS:
                self.faults.append(fault)

    def end(self) -> None:
        if not self._ids and not self.faults:
            self.faults.append(Fault("empty_file", "The input file has no lines."))

    def _fault(self, number: int, data: bytes) -> Fault | None:
        try:
            line = _read_line(data)
            body = msgspec.json.decode(line.body, type=_Streamed)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return Fault("invalid_json_line", f"This line is not a request of a batch: {error}", number)
        if line.url != self._endpoint:
            told = f"The URL is {line.url[:100]!r}, must be the batch's endpoint {self._endpoint!r}."
            return Fault("mismatched_url", told, number, "url")
        if body.stream:
            return Fault("invalid_request", "An answer of a batch cannot be streamed.", number, "body.stream")
        if line.custom_id in self._ids:
            return Fault("duplicate_custom_id", f"{line.custom_id[:100]!r} names a line before.", number, "custom_id")
        if len(self._ids) >= MAX_LINES:
            return Fault("too_many_lines", f"A batch has at most {MAX_LINES} lines.", number)
        self._ids.add(line.custom_id)
        return None


class OutputFiles:
    """The two files of a batch that grow line by line.

    Invariant: a line is in `done` only after it was written, and each custom_id is written at most once.
    """

    def __init__(self, output: Path, errors: Path, total: int) -> None:
        """Finds what was written before; what a process that died has left of a line is cut off. Raises OSError."""
        self._paths = output, errors
        self._total = total
        self._lengths = [0, 0]  # lines of each
        self.done: set[str] = set()
        for kind, path in enumerate(self._paths):
            path.parent.mkdir(parents=True, exist_ok=True)
            for custom_id in _written(path):
                self.done.add(custom_id)
                self._lengths[kind] += 1
        self._files = [path.open("ab", buffering=0) for path in self._paths]

    def counts(self) -> Counts:
        return Counts(self._total, *self._lengths)

    def has(self, kind: int) -> bool:
        return self._lengths[kind] > 0

    def append(self, lines: Sequence[OutputLine]) -> None:
        """Lines with a response of status 200 go to the output file, others to the error file. Raises OSError."""
        kinds = [0 if line.response is not None and line.response.status_code == 200 else 1 for line in lines]
        for kind in (0, 1):
            data = b"".join(encode_line(line) + b"\n" for line, its in zip(lines, kinds, strict=True) if its == kind)
            while data:
                data = data[self._files[kind].write(data) :]
        for line, kind in zip(lines, kinds, strict=True):
            self._lengths[kind] += 1
            self.done.add(line.custom_id)

    def close(self) -> None:
        for file in self._files:
            file.close()


def _written(path: Path) -> Iterator[str]:
    """The custom_ids of a file's whole lines. Cuts off what follows them."""
    with path.open("ab+") as file:
        file.seek(0)
        end = 0
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                yield msgspec.json.decode(line, type=_Answered).custom_id
            except msgspec.MsgspecError:
                break
            end += len(line)
        file.truncate(end)
