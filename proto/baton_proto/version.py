"""Versions of wire messages. A new field with a default keeps the major number; anything else raises it."""

import msgspec


class VersionError(msgspec.DecodeError):
    """A message of a major version that this build does not speak."""


def check_major(message: str, theirs: int, ours: int) -> None:
    """Raises VersionError when the message's major version is not ours."""
    if theirs != ours:
        raise VersionError(f"{message}: major version {theirs} is not understood here; this build speaks {ours}")
