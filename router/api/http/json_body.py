"""A request's body: JSON of a bounded size, as one of the types of openai_types.py.

A body of IN_PLACE_BYTES is decoded in less than a millisecond; the shape of a longer one is looked at before.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from router.api.http.openai_fields import NOT_SERVED, WITHOUT_EFFECT, CacheOptions, ChatMessage, StreamOptions, TextPart
from router.api.http.openai_types import GenerationBody
from router.api.json_shape import check_shape
from router.api.names import too_long
from router.api.sampling_options import Options
from router.api.validation import IN_PLACE_BYTES, Prompt
from runtime.errors import InvalidRequestError, UnknownFieldError, nearest
from runtime.side_lane import SideLane

SHOWN_CHARS: Final = 40  # of an unknown name

# Half of an emoji, which a program leaves that cuts text by UTF-16 units; msgspec takes it for the end of the data.
_HALF_CHARACTER = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_LONGER = re.compile(r"`str` of length <= (\d+)$")
_INDEX = re.compile(r"\[[^][]*\]")
_INNER: Mapping[str, type[Struct]] = {
    "messages": ChatMessage,
    "content": TextPart,
    "stream_options": StreamOptions,
    "prompt_cache_options": CacheOptions,
}

Body = TypeVar("Body", bound=GenerationBody)
Plain = TypeVar("Plain", bound=Struct)
Told = TypeVar("Told")
Read = TypeVar("Read")


async def read_soon(
    lane: SideLane, deadline_s: float | None, read: Callable[[bytes, Told], Read], data: bytes, told: Told
) -> Read:
    """`read(data, told)`: a short body at once, a longer one in the lane. Raises what either raises."""
    if len(data) <= IN_PLACE_BYTES:
        return read(data, told)
    return await lane.run(deadline_s, read, data, told)


def read_body(data: bytes, kind: type[Body]) -> tuple[Body, Options, Sequence[Prompt]]:
    """All that can be said without the model. Raises InvalidRequestError."""
    body = parse_body(data, kind)
    return body, body.options(), body.prompts()


def parse_body(data: bytes, kind: type[Body]) -> Body:
    """Raises InvalidRequestError, naming the field where there is one."""
    body = decode_body(data, kind)
    refuse_not_served(body, NOT_SERVED)
    return body


def refuse_not_served(body: Struct, not_served: Mapping[str, tuple[Any, ...]]) -> None:
    """`not_served`: fields that are known, with the values that change nothing. Raises InvalidRequestError."""
    for name, harmless in not_served.items():
        value = getattr(body, name)
        if value is not None and value not in harmless:
            raise InvalidRequestError(name, "is not supported; leave it out")


def decode_body(data: bytes, kind: type[Plain]) -> Plain:
    """Raises InvalidRequestError, naming the field where there is one."""
    check_shape(data)
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), kind) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        half = _HALF_CHARACTER.search(data, 0, IN_PLACE_BYTES)
        problem = f"{half[0].decode()} is half a character" if half else str(error)
        raise InvalidRequestError("body", f"is not valid JSON: {problem}") from error


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
        known_types: Mapping[str, type[Struct]] = getattr(kind, "inner", _INNER)
        inner = known_types.get(_INDEX.sub("", field).rpartition(".")[2], kind)
        return UnknownFieldError(".".join(filter(None, (field, name))), nearest(name, served_fields(inner, kind)))
    return InvalidRequestError(field or "body", problem)


def served_fields(inner: type[Struct], kind: type[Struct]) -> list[str]:
    """The fields of a body of this kind, or of a part of it, that have an effect."""
    hidden = unserved_fields(kind)
    return [known for known in inner.__struct_fields__ if known not in hidden]


def unserved_fields(kind: type[Struct]) -> Collection[str]:
    """The fields of a body that are refused or have no effect."""
    return (*getattr(kind, "not_served", NOT_SERVED), *getattr(kind, "without_effect", WITHOUT_EFFECT))
