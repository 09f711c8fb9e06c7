"""How many files and connections this process may have open, and how they are shared out."""

import contextlib
import resource
from typing import Final

from msgspec import Struct

WANTED: Final = 65_536
RESERVE: Final = 1024  # for workers, NATS, files and what is just being refused; of a low limit a quarter


class Places(Struct, frozen=True):
    """Connections that clients may have at once."""

    http: int
    grpc: int


def raise_open_files() -> int:
    """Raises this process's soft limit to WANTED, or as far as the hard one allows. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    able = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < able:
        with contextlib.suppress(OSError, ValueError):  # what is refused here stays as it was
            resource.setrlimit(resource.RLIMIT_NOFILE, (able, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else soft


def shared_out(limit: int, most: int) -> Places:
    """Shares out `limit` open files, at most `most` for either kind of connection."""
    free = limit - min(RESERVE, limit // 4)
    grpc = max(1, min(most, free // 3))
    return Places(http=max(1, min(most, free - grpc)), grpc=grpc)
