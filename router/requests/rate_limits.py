"""How much a key's caller may ask per minute: requests, and tokens of prompts and answers.

Each limit is a token bucket, which holds a minute's amount. Because nobody knows how long an answer gets, a request is
let in as long as its buckets are not empty, and what it took is taken out afterwards: a bucket may owe, and then
refuses until that is made up for. What a caller takes at other routers is taken out here, too (shared_limits.py).
"""

import time
from collections.abc import Callable
from typing import Final

from runtime.errors import RateLimitError
from runtime.security.callers import Caller

UNITS: Final = ("requests", "tokens")
"""What is limited, in the order of an account's buckets."""


class Bucket:
    """Pure: the clock's times are handed in and never go back."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._seen_s = now_s

    def level(self, now_s: float) -> float:
        """Units that are left; below 0: owed."""
        added = (now_s - self._seen_s) * self.per_minute / 60.0
        self._level = min(float(self.per_minute), self._level + added)
        self._seen_s = now_s
        return self._level

    def wait_s(self, now_s: float) -> float:
        """Time until there is one unit again; 0: there is."""
        return max(0.0, 1.0 - self.level(now_s)) * 60.0 / self.per_minute

    def take(self, amount: float, now_s: float) -> None:
        self._level = self.level(now_s) - amount

    def lower(self, level: float, since_s: float, now_s: float) -> None:
        """No more is left than `level` was at `since_s`, and what has come since."""
        left = level + (now_s - since_s) * self.per_minute / 60.0
        self._level = min(self.level(now_s), left)


class Account:
    """What one key's caller has asked for. `changed` is called when the caller has taken something here."""

    def __init__(
        self, caller: Caller, clock: Callable[[], float], changed: Callable[[str], None] = lambda key: None
    ) -> None:
        self._clock = clock
        self._changed = changed
        self.key = caller.key
        self.buckets = [
            None if per_minute is None else Bucket(per_minute, clock())
            for per_minute in (caller.requests_per_minute, caller.tokens_per_minute)
        ]
        self.taken = [0, 0]  # here, since the router's start

    def admit(self) -> None:
        """Takes one request. Raises RateLimitError."""
        now_s = self._clock()
        for bucket, unit in zip(self.buckets, UNITS, strict=True):
            if bucket is not None and (wait_s := bucket.wait_s(now_s)) > 0:
                raise RateLimitError(unit, bucket.per_minute, wait_s)
        self._take(0, 1, now_s)

    def spend(self, tokens: int) -> None:
        self._take(1, tokens, self._clock())

    def _take(self, which: int, amount: int, now_s: float) -> None:
        bucket = self.buckets[which]
        if bucket is not None:
            bucket.take(amount, now_s)
            self.taken[which] += amount
            self._changed(self.key)


class RateLimits:
    """The accounts of all callers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.changed: Callable[[str], None] = lambda key: None  # called with the key's name
        self.opened: Callable[[Account], None] = lambda account: None
        self._accounts: dict[Caller, Account] = {}
        self.by_key: dict[str, Account] = {}  # the last of each key

    def account(self, caller: Caller) -> Account:
        """A caller whose line has changed begins anew."""
        account = self._accounts.get(caller)
        if account is None:
            account = self._accounts[caller] = Account(caller, self.clock, lambda key: self.changed(key))
            self.by_key[caller.key] = account
            self.opened(account)
        return account
