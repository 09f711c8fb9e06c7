"""What every process that serves does: it prints one readiness line, and ends in order after a signal."""

import asyncio
import contextlib
import os
import select
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from baton_proto.decoding import decoder
from runtime.config.serving import ServingConfig, load_config
from runtime.errors import ConfigError
from runtime.own_files import reopen_log
from runtime.processes.process import Ready
from runtime.telemetry.logging import set_level

LOG_VARIABLE: Final = "BATON_LOG_FILE"  # the file that a process's stderr goes to
CONFIG_VARIABLE: Final = "BATON_CONFIG_FILE"  # its configuration, which may change while it runs
BEATS_VARIABLE: Final = "BATON_BEATS"  # set: whoever started the process reads its beats
STDOUT: Final = 1
STDERR: Final = 2
READY_PREFIX: Final = b"BATON_READY "
BEAT: Final = b"BATON_BEAT\n"
BEAT_S: Final = 0.5  # between two

_decode_ready = decoder(Ready, json=True)


def print_ready(process: str, name: str, addresses: Mapping[str, str], problem: str = "", comes: bool = False) -> None:
    """Prints the one line on stdout that whoever started the process waits for."""
    ready = Ready(process, name, os.getpid(), dict(addresses), problem, comes)
    print((READY_PREFIX + msgspec.json.encode(ready)).decode(), flush=True)


def read_ready(line: bytes) -> Ready | None:
    """Reads a line; None when it is not the readiness line. Raises msgspec.DecodeError when its form is wrong."""
    if not line.startswith(READY_PREFIX):
        return None
    ready: Ready = _decode_ready(line.removeprefix(READY_PREFIX))
    return ready


async def beat() -> None:
    """Says on stdout, again and again, that this event loop turns. Does nothing where nobody reads it."""
    with contextlib.suppress(OSError):
        while BEATS_VARIABLE in os.environ:
            if select.select([], [STDOUT], [], 0)[1]:  # a reader that stands still must not stop us
                os.write(STDOUT, BEAT)
            await asyncio.sleep(BEAT_S)


class StopSignal(asyncio.Event):
    """`renewed`: called with the configuration whenever it was read again."""

    def __init__(self) -> None:
        super().__init__()
        self.renewed: list[Callable[[ServingConfig], None]] = []


def stop_signal(*numbers: signal.Signals) -> StopSignal:
    """An event that SIGTERM and SIGINT set, or else `numbers`. To be called in the event loop of the main thread. In a
    process whose stderr is a log of its own, SIGHUP opens the log anew and reads the configuration again."""
    stop = StopSignal()
    if path := os.environ.get(LOG_VARIABLE):
        config = os.environ.get(CONFIG_VARIABLE, "")
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _renew, path, config, stop.renewed)
    for number in numbers or (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _renew(path: str, config: str, renewed: Iterable[Callable[[ServingConfig], None]]) -> None:
    with contextlib.suppress(OSError):  # the old one is better than none
        reopen_log(path, STDERR)
    if config:
        with contextlib.suppress(ConfigError):
            now = load_config(Path(config))
            set_level(now.logging.level)
            for take in renewed:
                take(now)
