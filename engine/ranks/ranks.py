"""The other ranks of a tensor-parallel worker as rank 0 has them: their processes, what they are told, and their end.

They are children, die with us, and are of no use without each other: when one is lost, `on_lost` ends the worker.
"""

import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from engine.parallel.collective import Collective
from engine.ranks.command_channel import CommandWriter, ReaderEnds
from engine.ranks.rank_commands import Command, Stop, encode_command
from engine.ranks.rank_reports import OnPushEnded, ReportReader
from runtime.errors import RankLostError
from runtime.processes.launch import launch_command
from runtime.processes.process import how_it_ended

STOP_TIMEOUT_S = 5.0
HANG_LIMIT_S = 60.0  # for a command, once the model is loaded; kernels of a new shape may have to be compiled
EXPORT_TIMEOUT_S = 10.0
_CHECK_INTERVAL_S = 1.0
_STDERR = 2


class RankProcess:
    """Implements `engine.ranks.command_channel.Peer`. Started from the main thread: with the thread, the child ends."""

    def __init__(self, rank: int, module: str, ends: ReaderEnds, reports: int) -> None:
        """`reports`: a descriptor, that of its `ReportWriter`."""
        self.rank = rank
        inherited = (reports, *ends.all())
        self._process = subprocess.Popen(
            [*launch_command(module), str(rank), *map(str, inherited)],
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,  # ours belongs to whoever waits for our readiness line
            pass_fds=inherited,
            process_group=0,  # Ctrl-C in a terminal is for us
        )
        self.pidfd = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def lost(self, problem: str | None = None) -> RankLostError:
        if problem is None:
            problem = how_it_ended(self._process.wait(STOP_TIMEOUT_S))
        return RankLostError(self.rank, self.pid, problem)

    def end(self, timeout_s: float) -> None:
        """Waits for its end, or brings it about."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self.pidfd)


def end_process(error: RankLostError) -> None:
    """At once: the engine's thread may wait for the lost rank where nothing can wake it. Whoever uses this worker sees
    its streams break, and the other ranks die with it."""
    print(f"error: {error}; this worker ends", file=sys.stderr, flush=True)
    os._exit(1)


class Ranks:
    def __init__(
        self,
        size: int,
        on_lost: Callable[[RankLostError], None] = end_process,
        module: str = "engine.ranks.rank_process",
    ) -> None:
        """Starts ranks 1 to size - 1. `on_lost` is called once, by another thread. `module` runs rank_process.main."""
        self.size = size
        self.collective: Collective | None = None  # ours, let go of in `close`
        self._on_lost = on_lost
        self._losing = threading.Lock()
        self._is_lost = False
        self._hang_limit_s = float("inf")  # a model may take long to load
        self._folder = Path(tempfile.mkdtemp(prefix="baton-ranks-"))
        self._closing = os.eventfd(0)
        self._channel = CommandWriter(size - 1)
        self._reports = ReportReader(size - 1, self._malformed)
        self._processes: list[RankProcess] = []
        self._watcher: threading.Thread | None = None
        try:
            for rank in range(1, size):
                ends, reports = self._channel.ends(rank - 1), self._reports.writing_end(rank)
                self._processes.append(RankProcess(rank, module, ends, reports))
        except BaseException:
            self.close(timeout_s=0)
            raise
        self._channel.attach(self._processes)
        self._reports.start()
        self._watcher = threading.Thread(target=self._watch, name="watch ranks", daemon=True)
        self._watcher.start()

    @property
    def meeting(self) -> Path:
        """Where the Collective meets."""
        return self._folder / "meeting"

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def tell(self, command: Command) -> int:
        """Returns its sequence number at once. Any thread. Raises RankLostError."""
        return self._channel.send(encode_command(command))

    def wait_done(self, sequence: int, timeout_s: float) -> None:
        """Raises RankLostError when a rank ends first, or takes longer."""
        self._channel.wait_done(sequence, timeout_s)

    def listen(self, on_push_ended: OnPushEnded) -> None:
        """Before the first push."""
        self._reports.on_push_ended = on_push_ended

    def exported_slab(self, rank: int) -> int:
        """The descriptor that the rank answers ExportSlab with, the caller's own. Raises RankLostError."""
        fd = self._reports.slab(rank, EXPORT_TIMEOUT_S)
        if fd is None:
            raise self.dead() or self._processes[rank - 1].lost(f"sent no slab within {EXPORT_TIMEOUT_S:.0f} s")
        return fd

    def loaded(self) -> None:
        """From now on a command that takes long counts as a hang."""
        self._hang_limit_s = HANG_LIMIT_S

    def dead(self, timeout_s: float = 1.0) -> RankLostError | None:
        """A rank that has ended, or does within the time: its partners' sockets break a moment before."""
        poll = select.poll()
        for process in self._processes:
            poll.register(process.pidfd, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(timeout_s * 1e3)}
        return next((process.lost() for process in self._processes if process.pidfd in ready), None)

    def close(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ends them, by force those that take longer. Idempotent."""
        if self._closing < 0:
            return
        os.eventfd_write(self._closing, 1)
        if self._watcher is not None:
            self._watcher.join()
            try:
                self._channel.send(encode_command(Stop()), timeout_s)
            except RankLostError:
                timeout_s = 0.0
        deadline_s = time.monotonic() + timeout_s
        for process in self._processes:
            process.end(max(0.0, deadline_s - time.monotonic()))
        if self.collective is not None:
            self.collective.close()
            self.collective = None
        self._reports.close()
        self._channel.close()
        os.close(self._closing)
        self._closing = -1
        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self) -> None:
        poll = select.poll()
        for descriptor in (self._closing, *(process.pidfd for process in self._processes)):
            poll.register(descriptor, select.POLLIN)
        checked, checked_s = 0, time.monotonic()  # a command, and since when it is due
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(_CHECK_INTERVAL_S * 1e3)}
            if self._closing in ready:
                return
            lost = next((process.lost() for process in self._processes if process.pidfd in ready), None)
            behind = self._channel.behind(checked)
            if not behind:
                checked, checked_s = self._channel.sequence, time.monotonic()
            elif time.monotonic() - checked_s > self._hang_limit_s:
                lost = lost or self._processes[behind[0]].lost(f"has not answered for {self._hang_limit_s:.0f} s")
            if lost is not None:
                self._lose(lost)
                return

    def _malformed(self, rank: int, problem: str) -> None:
        self._lose(self._processes[rank - 1].lost(problem))

    def _lose(self, error: RankLostError) -> None:
        with self._losing:
            if self._is_lost:
                return
            self._is_lost = True
        self._on_lost(error)
