"""The bound of ids and names in requests of every protocol, which are kept beside the texts that they belong to."""

from typing import Annotated, Final

from msgspec import Meta

from runtime.errors import InvalidRequestError

MAX_NAME_CHARS: Final = 512

Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
"""A name in a field of a body; json_body.py refuses longer ones."""


def check_name(where: str, value: str) -> str:
    """Raises InvalidRequestError."""
    if len(value) > MAX_NAME_CHARS:
        raise InvalidRequestError(where, too_long(MAX_NAME_CHARS))
    return value


def too_long(limit: int) -> str:
    return f"is longer than the {limit} characters that are allowed; give a shorter one"
