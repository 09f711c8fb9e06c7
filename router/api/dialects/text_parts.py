"""Contents that are texts, or parts with texts, in any dialect."""

from collections.abc import Container, Sequence
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from runtime.errors import InvalidRequestError, shown


class TextPiece(Protocol):
    """A part of a content in any of the protocols."""

    @property
    def type(self) -> str: ...

    @property
    def text(self) -> str | None: ...


class Refusing(TextPiece, Protocol):
    @property
    def refusal(self) -> str | None: ...


Refusable = TypeVar("Refusable", bound=Refusing)


def plain_text(where: str, content: str | Sequence[TextPiece], types: Container[str], wanted: str) -> str:
    """Pieces of the types stand on lines of their own. Raises InvalidRequestError, which says what is `wanted`."""
    if isinstance(content, str):
        return content
    for index, piece in enumerate(content):
        if piece.type not in types or piece.text is None:
            given = f"is of type {shown(piece.type)}, " if piece.type not in types else ""
            raise InvalidRequestError(f"{where}[{index}]", f"{given}must be a {wanted}")
    return "\n".join(piece.text or "" for piece in content)


def with_refusals(role: str, content: str | Sequence[Refusable]) -> str | Sequence[Refusable]:
    """The content, where an assistant's refusals have become texts."""
    if role != "assistant" or isinstance(content, str):
        return content
    said: Sequence[Any] = content
    return [replace(part, type="text", text=part.refusal) if part.type == "refusal" else part for part in said]
