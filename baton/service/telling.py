"""How a service tells what happens to it."""

from typing import Any, Protocol


class Tell(Protocol):
    def __call__(self, line: str, *, event: str, **fields: Any) -> None:
        """`line` is for people, `event` and `fields` are for programs."""
