"""Reads a request's body: JSON of a bounded size, as a Struct.

A body's type may name `inner` (the types of its parts, by field), `not_served` (known fields -> the values that change
nothing) and `without_effect` (known fields that are not even decoded).

A body of IN_PLACE_BYTES is decoded in less than a millisecond; the shape of a longer one is looked at before.
"""

import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Raw, Struct

from router.api.wishes.json_shape import check_shape
from router.api.wishes.names import too_long
from router.api.wishes.validation import IN_PLACE_BYTES
from runtime.errors import InvalidRequestError, UnknownFieldError, drop_frames, nearest
from runtime.side_lane import SideLane

ABSENT: Final = Raw(b"")
NOTHING: Final[Mapping[str, Any]] = {}
SHOWN_CHARS: Final = 40  # of an unknown name

# Half of an emoji, which a program leaves that cuts text by UTF-16 units; msgspec takes it for the end of the data.
_HALF_CHARACTER = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_LONGER = re.compile(r"`str` of length <= (\d+)$")
_INDEX = re.compile(r"\[[^][]*\]")
Plain = TypeVar("Plain", bound=Struct)
Told = TypeVar("Told")
Read = TypeVar("Read")


class NotHereError(InvalidRequestError):
    """`find`: looks elsewhere for what the body names, and says whether it is here now."""

    def __init__(self, field: str, problem: str, find: Callable[[], Awaitable[bool]]) -> None:
        self.find = find
        super().__init__(field, problem)


async def read_soon(
    lane: SideLane, deadline_s: float | None, read: Callable[[bytes, Told], Read], data: bytes, told: Told
) -> Read:
    """`read(data, told)`: a short body at once, a longer one in the lane. Raises what either raises."""
    try:
        if len(data) <= IN_PLACE_BYTES:
            return read(data, told)
        return await lane.run(deadline_s, read, data, told)
    except NotHereError as missing:
        if not await missing.find():
            raise
        drop_frames(missing)
    return await lane.run(deadline_s, read, data, told)


def decode_body(data: bytes, kind: type[Plain]) -> Plain:
    """Raises InvalidRequestError, naming the field where there is one, also for a field that is not served."""
    check_shape(data)
    try:
        body = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), kind) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        half = _HALF_CHARACTER.search(data, 0, IN_PLACE_BYTES)
        problem = f"{half[0].decode()} is half a character" if half else str(error)
        raise InvalidRequestError("body", f"is not valid JSON: {problem}") from error
    not_served: Mapping[str, tuple[Any, ...]] = getattr(kind, "not_served", NOTHING)
    for name, harmless in not_served.items():
        value = getattr(body, name)
        if value is not None and value not in harmless:
            raise InvalidRequestError(name, "is not supported; leave it out")
    return body


def _refusal(problem: str, kind: type[Struct]) -> InvalidRequestError:
    """The field, and what is wrong with it, from the words of msgspec."""
    problem, _, path = problem.partition(" - at ")
    field = path.rpartition("$")[2].strip("`.")
    ours, _, name = problem.partition("`")
    name = name.rpartition("`")[0][:SHOWN_CHARS]
    if "missing required field" in ours:
        return InvalidRequestError(".".join(filter(None, (field, name))), problem)
    if bound := _LONGER.search(problem):
        return InvalidRequestError(field or "body", too_long(int(bound[1])))
    if "unknown field" in ours:
        parts: Mapping[str, type[Struct]] = getattr(kind, "inner", NOTHING)
        part = parts.get(_INDEX.sub("", field).rpartition(".")[2], kind)
        return UnknownFieldError(".".join(filter(None, (field, name))), nearest(name, served_fields(part)))
    return InvalidRequestError(field or "body", problem)


def served_fields(kind: type[Struct]) -> list[str]:
    """The fields of a body, or of a part of one, that have an effect."""
    hidden = unserved_fields(kind)
    return [known for known in kind.__struct_fields__ if known not in hidden]


def unserved_fields(kind: type[Struct]) -> Collection[str]:
    """The fields that are refused or have no effect."""
    return (*getattr(kind, "not_served", ()), *getattr(kind, "without_effect", ()))
