"""The versions of all that routers and workers tell each other. A worker's record names them, so that two processes
which cannot talk are known before the first word."""

from typing import Final

from baton_proto import kv_events, worker
from baton_proto.version import VersionError

SPOKEN: Final = f"worker {worker.MAJOR}, kv events {kv_events.MAJOR}"


def check_spoken(theirs: str) -> None:
    """Raises VersionError. Empty: what a record's own version says is all."""
    if theirs not in ("", SPOKEN):
        raise VersionError(f"it speaks {theirs}; this build speaks {SPOKEN}")
