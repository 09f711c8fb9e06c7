"""The keys that a port takes as `Authorization: Bearer KEY`. Asked once per request, from any thread."""

import hashlib
import hmac
import os
import time
from collections.abc import Sequence

import structlog

from runtime.errors import ConfigError
from runtime.security.secret import Secret, read_secrets

RELOAD_S = 2.0
FILE_FIELD = "security.api_key_file"

log = structlog.get_logger()


class BearerKeys:
    """With `file`, what stands there at the moment, give or take RELOAD_S: keys are changed while the service runs."""

    def __init__(self, keys: Sequence[Secret], file: str | None = None) -> None:
        """At least one key."""
        self._file = file
        self._state = _state(file)
        self._look_again_s = time.monotonic() + RELOAD_S
        self._take(keys)

    def accepts(self, authorization: bytes) -> bool:
        """The value of the header. Takes the same time for every wrong key."""
        self._look()
        scheme, _, key = authorization.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        known = False
        for ours in self._digests:
            known |= hmac.compare_digest(ours, digest)
        return known and scheme.lower() == b"bearer"

    def first(self) -> Secret:
        """For who has to show one himself."""
        self._look()
        return self._first

    def _take(self, keys: Sequence[Secret]) -> None:
        self._first = keys[0]
        # Of one length, so that a comparison tells nothing about that of a key.
        self._digests = [hashlib.sha256(key.reveal().encode()).digest() for key in keys]

    def _look(self) -> None:
        """Takes what stands in the file now, if it has changed."""
        if self._file is None or time.monotonic() < self._look_again_s:
            return
        self._look_again_s = time.monotonic() + RELOAD_S
        state = _state(self._file)
        if state == self._state:
            return
        self._state = state
        try:
            keys = read_secrets(self._file, FILE_FIELD)
        except ConfigError as error:
            log.warning("API keys stay as they were", reason=str(error))
            return
        self._take(keys)
        log.info("API keys read again", keys=len(keys))


def bearer(key: Secret) -> str:
    """The header's value."""
    return f"Bearer {key.reveal()}"


def _state(file: str | None) -> tuple[int, int, int] | None:
    """What changes when the file does; None: it cannot be read."""
    try:
        stat = os.stat(file) if file is not None else None
    except OSError:
        return None
    return (stat.st_ino, stat.st_mtime_ns, stat.st_size) if stat is not None else None
