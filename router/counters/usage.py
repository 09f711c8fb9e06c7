"""Who used how many tokens: counters by key, tenant and model, and, where `logging.usage` names a file, a line for each
request that has ended."""

import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Final, NamedTuple

import structlog
from msgspec.json import Encoder
from msgspec.structs import asdict

from baton_proto.token_counts import TokenCounts
from runtime.own_files import as_config_error, open_log
from runtime.sparing import Sparing
from runtime.telemetry.metrics import Samples

MAX_PAYERS: Final = 1000  # with counters of their own: each costs three series at every scrape
OTHERS: Final = "others"  # key and tenant of all later ones together
MAX_WAITING: Final = 16_384  # lines that are not written yet; of more the oldest are lost
WRITE_S: Final = 0.25  # between two writes
CLOSE_S: Final = 5.0  # for the last lines
STDOUT: Final = "-"
FIELD: Final = "logging.usage"

log = structlog.get_logger()
spare = Sparing(lines=1)
_encode = Encoder().encode


class Payer(NamedTuple):
    """Whose tokens they are. `key`: its name; like the tenant empty where no key is asked for."""

    key: str = ""
    tenant: str = ""
    model: str = ""


NOBODY: Final = Payer()


class UsageLog:
    """Appends lines to a file, or to stdout. On the event loop a line costs its encoding. A thread writes, and opens
    the file each time, so that it may be moved away at any time."""

    def __init__(self, path: str, router_id: str) -> None:
        """Raises ConfigError."""
        self.lost = 0
        self._router_id = router_id
        self._path = None if path == STDOUT else Path(path).expanduser()
        if self._path is not None:
            with as_config_error(self._path, FIELD):
                os.close(open_log(self._path))
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING)
        self._torn = False  # the last write ended within a line
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="usage", daemon=True)
        self._thread.start()

    def add(self, payer: Payer, request_id: str, outcome: str, tokens: TokenCounts, duration_ms: float) -> None:
        """Fields are added, never renamed: programs read them."""
        self.lost += len(self._waiting) == MAX_WAITING
        line = {"time": round(time.time(), 3), "router": self._router_id, "request_id": request_id}
        line |= payer._asdict() | {"outcome": outcome} | asdict(tokens) | {"duration_ms": duration_ms}
        self._waiting.append(_encode(line) + b"\n")

    def close(self) -> None:
        """Writes what waits, within CLOSE_S."""
        self._closing.set()
        self._thread.join(CLOSE_S)

    def write(self) -> None:
        """Writes what waits, from one thread at a time."""
        lines = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not lines:
            return
        try:
            if self._path is None:
                for line in lines:  # each shorter than a pipe's atomic write, so that no other line comes between
                    os.write(1, line)
            else:
                self._append(b"\n" * self._torn + b"".join(lines))
        except OSError as error:
            self.lost += len(lines)
            spare(log.warning, "lines of usage are lost", lines=len(lines), reason=str(error))

    def _write_all(self) -> None:
        while not self._closing.wait(WRITE_S):
            self.write()
        self.write()

    def _append(self, data: bytes) -> None:
        assert self._path is not None
        file = open_log(self._path)
        try:
            while data:
                data = data[os.write(file, data) :]
                self._torn = bool(data)
        finally:
            os.close(file)


class Usage:
    """Counts for the event loop's thread. `log`: None where nobody wants lines."""

    def __init__(self) -> None:
        self.log: UsageLog | None = None
        self._tokens: dict[Payer, TokenCounts] = {}

    def add(self, payer: Payer, request_id: str, outcome: str, tokens: TokenCounts, duration_ms: float) -> None:
        """A request has ended. `tokens`: 0 of a prompt that no worker ran."""
        (self._tokens.get(payer) or self._begun(payer)).add(tokens)
        if self.log is not None:
            self.log.add(payer, request_id, outcome, tokens, duration_ms)

    def of(self, name: str, labels: int = len(Payer._fields)) -> Samples:
        """The counts of this name, with the first `labels` of a payer."""
        return [(payer[:labels], getattr(counts, name)) for payer, counts in list(self._tokens.items())]

    def lines_lost(self) -> int:
        return 0 if self.log is None else self.log.lost

    def _begun(self, payer: Payer) -> TokenCounts:
        if len(self._tokens) >= MAX_PAYERS:
            payer = Payer(OTHERS, OTHERS, payer.model)
        return self._tokens.setdefault(payer, TokenCounts())
