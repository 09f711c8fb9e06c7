"""The keys that a port takes as `Authorization: Bearer KEY`. Any thread may ask."""

import hashlib
import hmac
import time
from collections.abc import Sequence

import structlog

from runtime.errors import ConfigError
from runtime.security.secret import Secret, read_secrets, state_of

RELOAD_S = 2.0
FILE_FIELD = "security.api_key_file"

log = structlog.get_logger()


class BearerKeys:
    """`keys`: at least one. `file`: where they come from; it is read again within RELOAD_S of a change: keys change
    while the service runs."""

    def __init__(self, keys: Sequence[Secret], file: str | None = None) -> None:
        self._file = file
        self._state = state_of(file)
        self._look_again_s = time.monotonic() + RELOAD_S
        self._take(keys)

    def accepts(self, authorization: bytes) -> bool:
        """Whether the header's value shows one of the keys. Takes the same time for every wrong key."""
        self._look()
        scheme, _, key = authorization.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        known = False
        for ours in self._digests:
            known |= hmac.compare_digest(ours, digest)
        return known and scheme.lower() == b"bearer"

    def first(self) -> Secret:
        """The key that our own calls show."""
        self._look()
        return self._first

    def _take(self, keys: Sequence[Secret]) -> None:
        self._first = keys[0]
        # Digests have one length: a comparison tells nothing about the length of a key.
        self._digests = [hashlib.sha256(key.reveal().encode()).digest() for key in keys]

    def _look(self) -> None:
        """Takes the keys in the file when it has changed."""
        if self._file is None or time.monotonic() < self._look_again_s:
            return
        self._look_again_s = time.monotonic() + RELOAD_S
        state = state_of(self._file)
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
    """The value of the header."""
    return f"Bearer {key.reveal()}"
