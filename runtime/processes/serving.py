"""What every process that serves does: it prints one readiness line, and ends in order after a signal."""

import asyncio
import os
import signal
from collections.abc import Mapping
from typing import Final

import msgspec

from baton_proto.decoding import decoder
from runtime.processes.process import Ready

READY_PREFIX: Final = b"BATON_READY "

_decode_ready = decoder(Ready, json=True)


def print_ready(process: str, name: str, addresses: Mapping[str, str]) -> None:
    """Prints the one line on stdout that whoever started the process waits for."""
    ready = Ready(process, name, os.getpid(), dict(addresses))
    print((READY_PREFIX + msgspec.json.encode(ready)).decode(), flush=True)


def read_ready(line: bytes) -> Ready | None:
    """Reads a line; None when it is not the readiness line. Raises msgspec.DecodeError when its form is wrong."""
    if not line.startswith(READY_PREFIX):
        return None
    ready: Ready = _decode_ready(line.removeprefix(READY_PREFIX))
    return ready


def stop_signal(*numbers: signal.Signals) -> asyncio.Event:
    """An event that SIGTERM and SIGINT set, or else `numbers`. To be called in the event loop of the main thread."""
    stop = asyncio.Event()
    for number in numbers or (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop
