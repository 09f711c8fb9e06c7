"""How much a key's caller may ask per minute: requests, and tokens of prompts and answers.

Each limit is a token bucket, which holds a minute's amount. Because nobody knows how long an answer gets, a request is
let in as long as its buckets are not empty, and what it took is taken out afterwards: a bucket may owe, and then
refuses until that is made up for. Each router counts by itself.
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

    def wait_s(self, now_s: float) -> float:
        """Time until there is one unit again; 0: there is."""
        self._fill(now_s)
        return max(0.0, 1.0 - self._level) * 60.0 / self.per_minute

    def take(self, amount: int, now_s: float) -> None:
        self._fill(now_s)
        self._level -= amount

    def _fill(self, now_s: float) -> None:
        added = (now_s - self._seen_s) * self.per_minute / 60.0
        self._level = min(float(self.per_minute), self._level + added)
        self._seen_s = now_s


class Account:
    """What one key's caller has asked for."""

    def __init__(self, caller: Caller, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.key = caller.key
        self._requests, self._tokens = (
            None if per_minute is None else Bucket(per_minute, clock())
            for per_minute in (caller.requests_per_minute, caller.tokens_per_minute)
        )

    def admit(self) -> None:
        """Takes one request. Raises RateLimitError."""
        now_s = self._clock()
        for bucket, unit in ((self._requests, "requests"), (self._tokens, "tokens")):
            if bucket is not None and (wait_s := bucket.wait_s(now_s)) > 0:
                raise RateLimitError(unit, bucket.per_minute, wait_s)
        if self._requests is not None:
            self._requests.take(1, now_s)

    def spend(self, tokens: int) -> None:
        if self._tokens is not None:
            self._tokens.take(tokens, self._clock())


class RateLimits:
    """The accounts of all callers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[Caller, Account] = {}

    def account(self, caller: Caller) -> Account:
        """A caller whose line has changed begins anew."""
        account = self._accounts.get(caller)
        if account is None:
            account = self._accounts[caller] = Account(caller, self._clock)
        return account
