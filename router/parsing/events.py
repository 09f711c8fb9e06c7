"""What the parts of an answer become, whatever protocol tells it."""

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
    """The answer was cut off within a call that had begun: what came of the call is to be dropped."""

    index: int


Event = Text | Reasoning | CallBegun | Arguments | CallCut


def joined(events: list[Event]) -> list[Event]:
    """Neighbours of one kind as one."""
    out: list[Event] = []
    for event in events:
        match (out[-1] if out else None), event:
            case Text(before), Text(text):
                out[-1] = Text(before + text)
            case Reasoning(before), Reasoning(text):
                out[-1] = Reasoning(before + text)
            case Arguments(index, before), Arguments(same, text) if index == same:
                out[-1] = Arguments(index, before + text)
            case _:
                out.append(event)
    return out
