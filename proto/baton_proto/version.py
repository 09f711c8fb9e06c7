"""Versions of wire messages. A new field with a default keeps the major number; anything else raises it."""

from baton.errors import ProtocolError


def check_major(message: str, theirs: int, ours: int) -> None:
    """Raises ProtocolError when a message has a major version that this build does not speak."""
    if theirs != ours:
        raise ProtocolError(message, f"major version {theirs} is not understood here; this build speaks {ours}")
