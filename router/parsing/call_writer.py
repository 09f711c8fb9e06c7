"""Turns the calls that a format reads into events."""

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from router.parsing.events import Arguments, CallBegun, CallCut, Event
from router.parsing.reader import MalformedError, Reader, Steps

Schemas = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> the JSON schema of its parameters."""

_SIGNS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.:-")


class CallWriter:
    """A call stands when it is done: `begin`, `arguments` as they are written, `done`; or else it is `cut`."""

    def __init__(self, emit: Callable[[Event], None], new_id: Callable[[], str], schemas: Schemas) -> None:
        self._emit = emit
        self._new_id = new_id
        self._arguments: list[str] = []
        self._num_begun = 0
        self.schemas = schemas
        self.num_calls = 0  # that are done
        self.is_open = False

    def begin(self, name: str) -> None:
        """Raises MalformedError."""
        if not 0 < len(name) <= 128 or not _SIGNS.issuperset(name):
            raise MalformedError
        self.is_open = True
        self._arguments = []
        self._emit(CallBegun(self._num_begun, self._new_id(), name))
        self._num_begun += 1

    def arguments(self, text: str) -> None:
        self._arguments.append(text)
        self._emit(Arguments(self._num_begun - 1, text))

    def done(self, reader: Reader) -> None:
        """Raises MalformedError when the arguments are no JSON object."""
        if not is_json_object("".join(self._arguments)):
            raise MalformedError
        self.is_open = False
        self.num_calls += 1
        reader.raw = []

    def cut(self) -> None:
        """The call that has begun, if any, does not stand."""
        if self.is_open:
            self.is_open = False
            self._emit(CallCut(self._num_begun - 1))


CallFormat = Callable[[Reader, CallWriter], Steps[None]]


def read_json(text: str) -> Any:
    """Reads JSON as the standard has it, without NaN and Infinity. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


def is_json_object(text: str) -> bool:
    try:
        return isinstance(read_json(text), dict)
    except ValueError:
        return False


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
