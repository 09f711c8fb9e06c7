"""Variables of a request for the chat template, beside its messages."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from router.api.wishes.json_shape import check_depth
from runtime.errors import InvalidRequestError

MAX_VARIABLE_BYTES = 64 * 1024  # as JSON

T = TypeVar("T")


def thinking_variables(effort: str | None) -> Mapping[str, Any]:
    """The variables by which chat templates read a `reasoning_effort`."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}


def verbosity_variables(verbosity: str | None) -> Mapping[str, Any]:
    return {} if verbosity is None else {"verbosity": verbosity}


def document_variables(written: Raw, name: str = "documents") -> Mapping[str, Any]:
    """Raises InvalidRequestError."""
    documents = _decoded(written, name, list[dict[str, Any]])
    return {} if documents is None else {name: documents}


def template_variables(kwargs: Raw, name: str = "chat_template_kwargs") -> Mapping[str, Any]:
    """`name`: the caller's, of the field. Raises InvalidRequestError."""
    written = memoryview(kwargs)
    if written.nbytes > MAX_VARIABLE_BYTES:
        raise InvalidRequestError(name, f"has {written.nbytes} bytes; at most {MAX_VARIABLE_BYTES} are allowed")
    return _decoded(kwargs, name, dict[str, Any]) or {}


def _decoded(raw: Raw, name: str, kind: type[T]) -> T | None:
    """None: it is absent, or null. Raises InvalidRequestError."""
    written = memoryview(raw)
    if not written:
        return None
    check_depth(name, bytes(written))
    try:
        return msgspec.json.decode(written, type=kind | None)
    except msgspec.DecodeError as error:
        raise InvalidRequestError(name, f"cannot be used: {error}") from error
