"""A process of this machine: its pid, its signals and its life, as the operating system tells them."""

import asyncio
import contextlib
import signal

from runtime.processes.process import Process


class LocalProcess(Process):
    """`start` of a subclass sets `_process`."""

    _process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def send_signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
