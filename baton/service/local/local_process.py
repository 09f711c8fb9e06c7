"""A process of this machine: its pid, its signals and its life, as the operating system tells them."""

import asyncio
import contextlib
import signal
from abc import abstractmethod

from runtime.processes.process import Process, ProcessExit


class LocalProcess(Process):
    """`start` of a subclass sets `_process`, and `_reader`, which reads what it says until its end."""

    _process: asyncio.subprocess.Process | None = None
    _reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def wait(self) -> ProcessExit:
        process, reader = self._process, self._reader
        assert process is not None, "not started"
        assert reader is not None
        returncode = await process.wait()
        await asyncio.shield(reader)
        return ProcessExit(self.name, process.pid, returncode, self.log_tail())

    @abstractmethod
    def log_tail(self) -> str:
        """The last lines that it has logged."""

    def send_signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
