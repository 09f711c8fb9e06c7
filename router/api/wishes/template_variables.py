"""Variables of a request for the chat template, beside its messages."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from router.api.wishes.json_shape import check_depth
from runtime.errors import InvalidRequestError

MAX_VARIABLE_BYTES = 64 * 1024  # as JSON


def thinking_variables(effort: str | None) -> Mapping[str, Any]:
    """The variables by which chat templates read a `reasoning_effort`."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}


def verbosity_variables(verbosity: str | None) -> Mapping[str, Any]:
    return {} if verbosity is None else {"verbosity": verbosity}


def document_variables(written: Raw, name: str = "documents") -> Mapping[str, Any]:
    """Raises InvalidRequestError."""
    if not memoryview(written):
        return {}
    check_depth(name, bytes(written))
    try:
        documents = msgspec.json.decode(written, type=list[dict[str, Any]] | None)
    except msgspec.DecodeError as error:
        raise InvalidRequestError(name, f"cannot be used: {error}") from error
    return {} if documents is None else {name: documents}


def template_variables(kwargs: Raw, name: str = "chat_template_kwargs") -> Mapping[str, Any]:
    """`name`: the caller's, of the field. Raises InvalidRequestError."""
    written = memoryview(kwargs)
    if written.nbytes > MAX_VARIABLE_BYTES:
        raise InvalidRequestError(name, f"has {written.nbytes} bytes; at most {MAX_VARIABLE_BYTES} are allowed")
    check_depth(name, bytes(written))
    try:
        return msgspec.json.decode(written, type=dict[str, Any] | None) or {} if written else {}
    except msgspec.DecodeError as error:
        raise InvalidRequestError(name, f"cannot be used: {error}") from error
