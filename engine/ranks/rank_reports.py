"""Reports from the other ranks of a tensor-parallel worker to rank 0: how pushes and copies to and from host memory and
disk ended, and descriptors of slabs.

Each rank inherits a SOCK_SEQPACKET socket, which keeps reports whole and in order.
"""

import os
import queue
import selectors
import socket
import threading
from collections.abc import Callable
from typing import TypeAlias

import msgspec
import structlog

from engine.blocks.disk_copies import Done
from kvtransfer.prefill_side.push import PushResult
from runtime.errors import ProtocolError, RankLostError

MAX_REPORT_BYTES = 64 << 10

log = structlog.get_logger()


class PushEnded(msgspec.Struct, frozen=True, tag="push_ended", array_like=True):
    """Answers BeginPush. Invariant: this rank does not read the source blocks again."""

    transfer_id: str
    result: PushResult


class SlabExported(msgspec.Struct, frozen=True, tag="slab_exported", array_like=True):
    """Answers ExportSlab; the slab's descriptor travels with the message."""


class CopyEnded(msgspec.Struct, frozen=True, tag="copy_ended", array_like=True):
    """Answers WriteCopy and ReadCopy."""

    done: Done


class KvMoved(msgspec.Struct, frozen=True, tag="kv_moved", array_like=True):
    """Answers StoreKv and LoadKv. Invariant: unless there is a problem, this rank makes no more copies for it."""

    move: int
    problem: str = ""


Report: TypeAlias = PushEnded | CopyEnded | KvMoved | SlabExported
OnPushEnded = Callable[[int, str, PushResult], None]
"""(rank, transfer id, result), on the reader's thread."""
OnCopyEnded = Callable[[Done], None]
"""On the reader's thread."""
OnMoved = Callable[[int], None]
"""(move), on the reader's thread."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Report).decode


class ReportWriter:
    """A rank's end. Thread-safe."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)

    def push_ended(self, transfer_id: str, result: PushResult) -> None:
        self._socket.send(_encode(PushEnded(transfer_id, result)))

    def copy_ended(self, done: Done) -> None:
        self._socket.send(_encode(CopyEnded(done)))

    def kv_moved(self, move: int, problem: str) -> None:
        self._socket.send(_encode(KvMoved(move, problem)))

    def slab_exported(self, fd: int) -> None:
        """Closes the descriptor."""
        try:
            socket.send_fds(self._socket, [_encode(SlabExported())], [fd])
        finally:
            os.close(fd)


class ReportReader:
    """Rank 0's end, for all ranks. The end of a rank is no report: engine/ranks/ranks.py watches for it."""

    def __init__(self, ranks: int, on_lost: Callable[[int, str], None]) -> None:
        """`ranks`: how many report, from rank 1 on. `on_lost(rank, problem)`: the rank is of no more use, and its later
        reports may not be read."""
        self.on_push_ended: OnPushEnded | None = None
        self.on_copy_ended: OnCopyEnded | None = None
        self.on_moved: OnMoved | None = None
        self._on_lost = on_lost
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(ranks)]
        self._ours = {rank: ours for rank, (ours, _) in enumerate(pairs, 1)}
        self._theirs = {rank: theirs for rank, (_, theirs) in enumerate(pairs, 1)}
        self._slabs: dict[int, queue.SimpleQueue[int]] = {rank: queue.SimpleQueue() for rank in self._ours}
        self._thread = threading.Thread(target=self._read_all, name="rank reports", daemon=True)

    def writing_end(self, rank: int) -> int:
        """The descriptor that the rank inherits; `start` closes this process's copy."""
        return self._theirs[rank].fileno()

    def start(self) -> None:
        """Starts reading, once every rank has inherited its end."""
        for theirs in self._theirs.values():
            theirs.close()
        self._thread.start()

    def slab(self, rank: int, timeout_s: float) -> int | None:
        """The next descriptor that the rank sends; the caller closes it. None when none comes in time."""
        try:
            return self._slabs[rank].get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Idempotent."""
        for ours in self._ours.values():
            if ours.fileno() >= 0 and self._thread.is_alive():
                ours.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._thread.is_alive():
            self._thread.join()
        for end in (*self._ours.values(), *self._theirs.values()):
            end.close()
        for slabs in self._slabs.values():
            while not slabs.empty():
                os.close(slabs.get())

    def _read_all(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, ours in self._ours.items():
                selector.register(ours, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    if not self._read(key.data):
                        selector.unregister(key.fileobj)

    def _read(self, rank: int) -> bool:
        """Reads one report; False when the rank sends no more."""
        try:
            data, fds, flags, _ = socket.recv_fds(self._ours[rank], MAX_REPORT_BYTES, 1)
        except OSError:  # the rank has died
            return False
        if not data:
            return False
        try:
            report = _decode(data)
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(fds) != isinstance(report, SlabExported):
                raise msgspec.ValidationError(f"{type(report).__name__} with {len(fds)} descriptors, flags {flags}")
        except msgspec.DecodeError as error:
            for fd in fds:
                os.close(fd)
            self._on_lost(rank, f"sent a malformed report: {error}")
            return False
        if isinstance(report, SlabExported):
            self._slabs[rank].put(fds[0])
        elif isinstance(report, CopyEnded):
            if self.on_copy_ended is not None:
                self.on_copy_ended(report.done)
        elif isinstance(report, KvMoved):
            if report.problem:
                self._on_lost(rank, report.problem)
            elif self.on_moved is not None:
                self.on_moved(report.move)
        elif self.on_push_ended is not None:
            self._hand_over(self.on_push_ended, rank, report)
        return True

    def _hand_over(self, on_push_ended: OnPushEnded, rank: int, report: PushEnded) -> None:
        try:
            on_push_ended(rank, report.transfer_id, report.result)
        except ProtocolError as error:
            self._on_lost(rank, error.problem)
        except RankLostError as error:  # the watcher of ranks notices too, and ends the worker
            log.info("a push's end could not be passed on", transfer_id=report.transfer_id, reason=str(error))
        except Exception:
            log.exception("the end of a rank's push was not dealt with", rank=rank, transfer_id=report.transfer_id)
