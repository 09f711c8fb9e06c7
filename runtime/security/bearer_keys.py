"""The keys that a port takes as `Authorization: Bearer KEY`. Any thread may ask."""

import hashlib
import hmac
import time
from collections.abc import Sequence
from typing import Self

import structlog

from runtime.errors import ConfigError
from runtime.security.callers import Caller, key_name, read_callers
from runtime.security.secret import Secret, state_of

RELOAD_S = 2.0
FILE_FIELD = "security.api_key_file"

log = structlog.get_logger()


class BearerKeys:
    """`keys`: each with who shows it; without any, nobody is let in. `file`: where they come from; it is read again
    within RELOAD_S of a change: keys change while the service runs."""

    def __init__(self, keys: Sequence[tuple[Secret, Caller]], file: str | None = None) -> None:
        self._file = file
        self._state = state_of(file)
        self._look_again_s = time.monotonic() + RELOAD_S
        self._take(keys)

    @classmethod
    def plain(cls, keys: Sequence[Secret]) -> Self:
        """Keys that say nothing of their callers."""
        return cls([(key, Caller("", key=key_name(key))) for key in keys])

    def accepts(self, authorization: bytes) -> bool:
        return self.caller(authorization) is not None

    def caller(self, authorization: bytes) -> Caller | None:
        """Whose key the header's value shows; None: it shows no key of ours. Takes the same time for every wrong
        key."""
        self._look()
        scheme, _, key = authorization.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        known = None
        for ours, caller in self._callers:
            if hmac.compare_digest(ours, digest):
                known = caller
        return known if scheme.lower() == b"bearer" else None

    def named(self, name: str) -> Caller | None:
        """Whose key has this name; None: there is no such key, or not any more."""
        self._look()
        return next((caller for _, caller in self._callers if caller.key == name), None)

    def first(self) -> Secret:
        """The key that our own calls show."""
        self._look()
        return self._keys[0]

    def _take(self, keys: Sequence[tuple[Secret, Caller]]) -> None:
        self._keys = [key for key, _ in keys]
        # Digests have one length: a comparison tells nothing about the length of a key.
        self._callers = [(hashlib.sha256(key.reveal().encode()).digest(), caller) for key, caller in keys]

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
            keys = read_callers(self._file, FILE_FIELD)
        except ConfigError as error:
            log.warning("API keys stay as they were", reason=str(error))
            return
        self._take(keys)
        log.info("API keys read again", keys=len(keys))


def bearer(key: Secret) -> str:
    """The value of the header."""
    return f"Bearer {key.reveal()}"
