"""Logins with a wrong key: counted, slowed down where they are many, and logged, a line a minute for each address."""

import ipaddress
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

import structlog

from runtime.sparing import Sparing

API_KEY: Final = "API key"
OPERATOR_KEY: Final = "operator key"
FREE: Final = 10  # a minute, of one address, that are answered at once
DELAY_S: Final = 1.0  # of the answers to the others
ADDRESSES_LOGGED: Final = 30  # a minute

log = structlog.get_logger()


class FailedLogins:
    """The failed logins of one process. A missing key is no login."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts = Counter({(api, key): 0 for api in ("http", "grpc") for key in (API_KEY, OPERATOR_KEY)})
        self._free = Sparing(FREE, clock)
        self._by_address = Sparing(1, clock)
        self._lines = Sparing(ADDRESSES_LOGGED, clock)

    def failed(self, api: str, key: str, address: str) -> float:
        """`key`: API_KEY or OPERATOR_KEY. Returns the seconds that the answer has to wait."""
        self.counts[api, key] += 1
        network = _network(address)
        before = self._by_address.take(network)
        if before is not None and self._lines.take("") is not None:
            log.warning("a login failed", api=api, key=key, address=network, more_in_the_minute_before=before)
        return 0.0 if self._free.take(network) is not None else DELAY_S


def _network(address: str) -> str:
    """An IPv6 host has as many addresses as it likes in its /64."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address[:80]
    return address if found.version == 4 else str(ipaddress.ip_network((found, 64), strict=False))
