"""How much a key's caller may ask per minute: requests, and tokens of prompts and answers.

Each limit is a token bucket, which holds a minute's amount. Because nobody knows how long an answer gets, a request is
let in as long as its buckets are not empty, and what it took is taken out afterwards: a bucket may owe, and then
refuses until that is made up for. What a caller takes at other routers is taken out here, too (shared_limits.py).
"""

import time
from collections.abc import Callable

from runtime.errors import RateLimitError
from runtime.security.callers import Caller


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
    """What one key's caller has asked for. `changed` is called with the key's name when the caller has
    taken something here."""

    def __init__(
        self, caller: Caller, clock: Callable[[], float], changed: Callable[[str], None] | None = None
    ) -> None:
        self._clock = clock
        self._changed = changed
        self.key = caller.key
        self.buckets = [  # of requests, of tokens
            None if per_minute is None else Bucket(per_minute, clock())
            for per_minute in (caller.requests_per_minute, caller.tokens_per_minute)
        ]
        self.taken = [0, 0]  # here, since the router's start

    def admit(self) -> None:
        """Takes one request. Raises RateLimitError."""
        requests, tokens = self.buckets
        if requests is tokens is None:
            return
        now_s = self._clock()
        for bucket, unit in ((requests, "requests"), (tokens, "tokens")):
            if bucket is not None and (wait_s := bucket.wait_s(now_s)) > 0:
                raise RateLimitError(unit, bucket.per_minute, wait_s)
        if requests is not None:
            requests.take(1, now_s)
            self.taken[0] += 1
            if self._changed is not None:
                self._changed(self.key)

    def spend(self, tokens: int) -> None:
        if (bucket := self.buckets[1]) is not None:
            bucket.take(tokens, self._clock())
            self.taken[1] += tokens
            if self._changed is not None:
                self._changed(self.key)


class RateLimits:
    """The accounts of all callers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.changed: Callable[[str], None] | None = None  # of accounts that are opened from then on
        self.opened: Callable[[Account], None] = lambda account: None
        self._accounts: dict[Caller, Account] = {}
        self.by_key: dict[str, Account] = {}  # the last of each key

    def account(self, caller: Caller) -> Account:
        """A caller whose line has changed begins anew."""
        account = self._accounts.get(caller)
        if account is None:
            account = self._accounts[caller] = Account(caller, self.clock, self.changed)
            self.by_key[caller.key] = account
            self.opened(account)
        return account
