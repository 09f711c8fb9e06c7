"""A request's body: JSON of a bounded size, as one of the types of openai_types.py.

A body of IN_PLACE_BYTES is decoded in less than a millisecond. Because decoding does not let other threads run and its
time depends on the number of values, those of a longer body are counted before.
"""

import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from router.api.http.openai_fields import NOT_SERVED, WITHOUT_EFFECT, CacheOptions, ChatMessage, StreamOptions, TextPart
from router.api.http.openai_types import GenerationBody
from router.api.sampling_options import Options
from router.api.validation import IN_PLACE_BYTES, MAX_VALUES, NAME_COST, Prompt
from runtime.errors import InvalidRequestError
from runtime.side_lane import SideLane

ESCAPES_PER_VALUE: Final = 8  # escaped characters of texts
SLICE_BYTES: Final = 256 * 1024
SHOWN_CHARS: Final = 40  # of an unknown name; looking for its neighbour takes the longer the longer it is

# Half of an emoji, which a program leaves that cuts text by UTF-16 units; msgspec takes it for the end of the data.
_HALF_CHARACTER = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
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
    if len(data) > IN_PLACE_BYTES:
        _check_values(data)
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
    if "unknown field" in ours:
        known_types: Mapping[str, type[Struct]] = getattr(kind, "inner", _INNER)
        inner = known_types.get(_INDEX.sub("", field).rpartition(".")[2], kind)
        hidden = unserved_fields(kind)
        served = [known for known in inner.__struct_fields__ if known not in hidden]
        (near,) = difflib.get_close_matches(name, served, n=1, cutoff=0.0)
        problem = f"is not known here; the nearest known field is {near!r}"
        return InvalidRequestError(".".join(filter(None, (field, name))), problem)
    return InvalidRequestError(field or "body", problem)


def unserved_fields(kind: type[Struct]) -> Collection[str]:
    """The fields of a body that are refused or have no effect."""
    return (*getattr(kind, "not_served", NOT_SERVED), *getattr(kind, "without_effect", WITHOUT_EFFECT))


def _check_values(data: bytes) -> None:
    """Raises InvalidRequestError. numpy lets other threads run meanwhile."""
    values, in_text, escaped = 0, False, False
    for start in range(0, len(data), SLICE_BYTES):
        part = np.frombuffer(data, np.uint8, min(SLICE_BYTES, len(data) - start), start)
        quotes = part == ord('"')
        at = np.flatnonzero(part == ord("\\"))
        if escaped:  # by the last byte of the slice before
            quotes[0] = False
            at = at[at > 0]
        escaped = False
        if len(at):
            begins = np.maximum.accumulate(np.where(np.diff(at, prepend=-2) > 1, at, 0))  # of each run of backslashes
            behind = at[(at - begins) % 2 == 0] + 1
            escaped = bool(behind[-1] == len(part))
            quotes[behind[: len(behind) - escaped]] = False
            values += len(behind) // ESCAPES_PER_VALUE
        texts = (np.cumsum(quotes, dtype=np.uint8) + in_text) % 2
        in_text = bool(texts[-1])
        bare = part[texts == 0]
        values += sum(int(np.count_nonzero(bare == ord(sign))) for sign in ",[{")
        values += NAME_COST * int(np.count_nonzero(bare == ord(":")))
        if values > MAX_VALUES:
            counted = f"a named one counts {NAME_COST}, {ESCAPES_PER_VALUE} escaped characters one"
            raise InvalidRequestError("body", f"has more than {MAX_VALUES} values ({counted}); send several requests")
