"""The other ranks of a tensor-parallel worker, as rank 0 holds them: child processes, the commands to them, their end.

The children die with rank 0. No rank is of use without the others: when one is lost, `on_lost` ends the worker.
"""

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from engine.parallel.collective import Collective
from engine.ranks.command_channel import CommandWriter, ReaderEnds
from engine.ranks.rank_commands import Command, Stop, encode_command
from engine.ranks.rank_reports import OnCopyEnded, OnMoved, OnPushEnded, ReportReader
from runtime.errors import RankLostError
from runtime.processes.launch import launch_command
from runtime.processes.owned_folder import temporary_folder
from runtime.processes.process import how_it_ended

STOP_TIMEOUT_S = 5.0
HANG_LIMIT_S = 60.0  # per command once the model is loaded; a new shape may need kernels compiled
EXPORT_TIMEOUT_S = 10.0
_CHECK_INTERVAL_S = 1.0
_STDERR = 2


class RankProcess:
    """Implements `engine.ranks.command_channel.Peer`. Invariant: the main thread starts it, because the child dies with
    the thread that started it."""

    def __init__(self, rank: int, module: str, ends: ReaderEnds, reports: int) -> None:
        """`reports`: the descriptor of the rank's `ReportWriter`."""
        self.rank = rank
        inherited = (reports, *ends.all())
        self._process = subprocess.Popen(
            [*launch_command(module), str(rank), *map(str, inherited)],
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,  # because rank 0's stdout carries its ready line
            pass_fds=inherited,
            process_group=0,  # because Ctrl-C in a terminal is for rank 0 alone
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
        """Waits for the process to end, and kills it after the time."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self.pidfd)


def end_process(error: RankLostError) -> None:
    """Ends this process at once, because its engine thread may wait for the lost rank where nothing can wake it. Users
    of this worker see their streams break; the other ranks die with it."""
    print(f"error: {error}; this worker ends", file=sys.stderr, flush=True)
    os._exit(1)


class Ranks:
    def __init__(
        self,
        size: int,
        on_lost: Callable[[RankLostError], None] = end_process,
        module: str = "engine.ranks.rank_process",
    ) -> None:
        """Starts ranks 1 to size - 1, each as `module`, which runs rank_process.main. Another thread calls `on_lost`,
        once."""
        self.size = size
        self.collective: Collective | None = None  # rank 0's; `close` closes it
        self._on_lost = on_lost
        self._losing = threading.Lock()
        self._is_lost = False
        self._hang_limit_s = float("inf")  # until `loaded`: a model may take long to load
        self._folder = temporary_folder("baton-ranks-")
        self._is_closing = False
        self._closing = os.eventfd(0)  # readable from `close` on
        self._channel = CommandWriter(size - 1)
        self._reports = ReportReader(size - 1, self._lost)
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
        """The path where the ranks' Collective meets."""
        return self._folder.path / "meeting"

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def tell(self, command: Command) -> int:
        """Returns the command's sequence number; does not wait for the ranks to carry it out. Thread-safe. Raises
        RankLostError."""
        return self._channel.send(encode_command(command))

    def wait_done(self, sequence: int, timeout_s: float) -> None:
        """Waits until every rank has carried the command out. Raises RankLostError when a rank ends first, or takes
        longer."""
        self._channel.wait_done(sequence, timeout_s)

    def listen(self, on_push_ended: OnPushEnded) -> None:
        """Names the listener, before the first push."""
        self._reports.on_push_ended = on_push_ended

    def listen_to_copies(self, on_copy_ended: OnCopyEnded) -> None:
        """Names the listener, before the first write or read of a disk."""
        self._reports.on_copy_ended = on_copy_ended

    def listen_to_moves(self, on_moved: OnMoved) -> None:
        """Names the listener, before the first copy to host memory."""
        self._reports.on_moved = on_moved

    def exported_slab(self, rank: int) -> int:
        """The descriptor with which the rank answers ExportSlab; the caller closes it. Raises RankLostError."""
        fd = self._reports.slab(rank, EXPORT_TIMEOUT_S)
        if fd is None:
            raise self.dead() or self._processes[rank - 1].lost(f"sent no slab within {EXPORT_TIMEOUT_S:.0f} s")
        return fd

    def loaded(self) -> None:
        """Counts a command that takes longer than HANG_LIMIT_S as a hang from now on."""
        self._hang_limit_s = HANG_LIMIT_S

    def dead(self, timeout_s: float = 1.0) -> RankLostError | None:
        """Returns the loss of a rank that has ended, or ends within the time: its partners notice a moment before. None
        when no rank does, at once after `close`."""
        poll = select.poll()
        for descriptor in (self._closing, *(process.pidfd for process in self._processes)):
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(timeout_s * 1e3)}
        return next((process.lost() for process in self._processes if process.pidfd in ready), None)

    def close(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stops the ranks, and kills those that take longer. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
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
        self._folder.close()

    def _watch(self) -> None:
        checked, checked_s = 0, time.monotonic()  # a command, and since when it is due
        while True:
            lost = self.dead(_CHECK_INTERVAL_S)
            if self._is_closing:
                return
            behind = self._channel.behind(checked)
            if not behind:
                checked, checked_s = self._channel.sequence, time.monotonic()
            elif time.monotonic() - checked_s > self._hang_limit_s:
                lost = lost or self._processes[behind[0]].lost(f"has not answered for {self._hang_limit_s:.0f} s")
            if lost is not None:
                self._lose(lost)
                return

    def _lost(self, rank: int, problem: str) -> None:
        self._lose(self._processes[rank - 1].lost(problem))

    def _lose(self, error: RankLostError) -> None:
        with self._losing:
            if self._is_lost:
                return
            self._is_lost = True
        self._on_lost(error)
