"""Reads a form with a file (multipart/form-data, RFC 7578) piece by piece."""

from collections.abc import Callable
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from runtime.errors import InvalidRequestError

MAX_HEAD_BYTES: Final = 8192  # of a part
MAX_FIELD_BYTES: Final = 4096  # of all fields but the file
MAX_PARTS: Final = 16
FILE: Final = "file"


class Form:
    """`fields`: the parts but the file, by name. `take`: gets what the file holds."""

    def __init__(self, content_type: str, take: Callable[[bytes], object]) -> None:
        """Raises InvalidRequestError."""
        kind, parameters = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not 0 < len(parameters.get(b"boundary", b"")) <= 70:
            raise InvalidRequestError("content-type", "must be multipart/form-data with a boundary")
        self.filename: str | None = None  # None: no file has begun
        self.is_whole = False
        self._take = take
        self._texts: dict[str, bytearray] = {}
        self._name = ""  # of the part that is being read
        self._header, self._value = bytearray(), bytearray()
        self._num_parts = 0
        self._parser = MultipartParser(
            parameters[b"boundary"],
            {
                "on_part_begin": self._begin_part,
                "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                "on_header_end": self._end_header,
                "on_part_data": lambda data, start, end: self._give(data[start:end]),
                "on_end": self._end,
            },
            max_header_size=MAX_HEAD_BYTES,
        )

    @property
    def fields(self) -> dict[str, str]:
        return {name: text.decode("utf-8", "replace") for name, text in self._texts.items()}

    def feed(self, data: bytes) -> None:
        """Raises InvalidRequestError."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequestError("body", f"is no form: {error}") from error

    def _begin_part(self) -> None:
        self._num_parts += 1
        self._name = ""
        if self._num_parts > MAX_PARTS:
            raise InvalidRequestError("body", f"is a form of more than {MAX_PARTS} parts")

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, told = parse_options_header(self._value.decode("latin-1"))
            self._name = told.get(b"name", b"").decode("utf-8", "replace")
            if self._name == FILE:
                self.filename = told.get(b"filename", b"file").decode("utf-8", "replace")
            else:
                self._texts[self._name] = bytearray()
        self._header.clear()
        self._value.clear()

    def _give(self, data: bytes) -> None:
        if self._name == FILE:
            self._take(data)
        elif self._name:
            self._texts[self._name] += data
            if sum(map(len, self._texts.values())) > MAX_FIELD_BYTES:
                raise InvalidRequestError(self._name, f"is too long: fields have {MAX_FIELD_BYTES} bytes together")

    def _end(self) -> None:
        self.is_whole = True
