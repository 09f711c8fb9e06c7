"""Events that tell the parts of an answer, whatever the dialect."""

from itertools import groupby

import msgspec
from msgspec import Struct


class Text(Struct, frozen=True):
    text: str


class Reasoning(Struct, frozen=True):
    text: str


class CallBegun(Struct, frozen=True):
    """A call of a tool. Its arguments follow in pieces."""

    index: int
    id: str
    name: str


class Arguments(Struct, frozen=True):
    """A piece of a call's arguments; all pieces of a call together are JSON."""

    index: int
    text: str


class CallCut(Struct, frozen=True):
    """A call that had begun does not stand, because the answer ends within it or its arguments are no JSON object: what
    came of it is to be dropped."""

    index: int


Event = Text | Reasoning | CallBegun | Arguments | CallCut


def joined(events: list[Event]) -> list[Event]:
    """Neighbours of one kind as one, at a cost of their length: a text is copied once, however many pieces it has."""
    out: list[Event] = []
    for _, neighbours in groupby(events, key=_kind):
        first, *rest = neighbours
        if rest and isinstance(first, Text | Reasoning | Arguments):
            text = "".join(one.text for one in (first, *rest) if isinstance(one, Text | Reasoning | Arguments))
            out.append(msgspec.structs.replace(first, text=text))
        else:
            out += [first, *rest]
    return out


def _kind(event: Event) -> tuple[type[Event], int]:
    """The event's type, and the number of its call if it has one."""
    return type(event), 0 if isinstance(event, Text | Reasoning) else event.index
