"""The disk tiers of a tensor-parallel worker: each rank has one for its own part of each block, in slots that rank 0
decides on."""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path

import structlog

from engine.blocks.disk_copies import DiskBlock, Done
from engine.ranks.rank_commands import CloseDisk, DiskCommand, MoveDisk, OpenDisk, ReadCopy, WipeDisk, WriteCopy
from engine.ranks.ranked_tier import RankTier
from engine.ranks.ranks import Ranks
from engine.tiers.block_files import RankFiles
from engine.tiers.disk_kv import LATE_S, REST_S, STOP_TIMEOUT_S, DiskKv, window_files
from kvtransfer.slab.layout import SlabLayout
from runtime.errors import RankLostError

log = structlog.get_logger()


class RankedDisk:
    """Implements `engine.blocks.disk_copies.DiskTier` on rank 0. A read or write has ended when it has on every rank,
    and went well when it did on all. Methods raise RankLostError."""

    def __init__(self, own: DiskKv, ranks: Ranks) -> None:
        self.num_slots, self.num_window_slots = own.num_slots, own.num_window_slots
        self.wake: Callable[[], object] = lambda: None
        self._own = own
        self._ranks = ranks
        self._others: deque[Done] = deque()  # what has ended on other ranks
        self._num_errors = 0  # of other ranks
        self._left: dict[int, int] = {}  # copy -> ranks on which its read or write goes on, the oldest first
        self._failed: set[int] = set()  # those of them that went wrong on some rank
        self._reads: set[int] = set()  # those that go on
        self._ended_s = 0.0  # the last end of a read on any rank, or the first read after an idle time
        self._half_s: dict[int, float] = {}  # reads -> when the first rank ended them, the oldest first
        self._silent_until_s = 0.0
        own.wake = lambda: self.wake()
        ranks.listen_to_copies(self._ended)
        ranks.tell(OpenDisk(str(own.files.folder), own.num_slots))

    @property
    def num_errors(self) -> int:
        return self._own.num_errors + self._num_errors

    @property
    def block_s(self) -> float:
        return self._own.block_s

    @property
    def max_writes(self) -> int:
        return self._own.max_writes if time.monotonic() >= self._silent_until_s else 0

    def write(self, slot: int, copy: int, block: DiskBlock) -> None:
        self._left[copy] = self._ranks.size
        self._ranks.tell(WriteCopy(slot, copy, block))
        self._own.write(slot, copy, block)

    def read(self, copy: int, slot: int, block: DiskBlock) -> None:
        self._left[copy] = self._ranks.size
        if not self._reads:
            self._ended_s = time.monotonic()
        self._reads.add(copy)
        self._ranks.tell(ReadCopy(copy, slot, block))
        self._own.read(copy, slot, block)

    def wipe(self) -> None:
        self._ranks.tell(WipeDisk())
        self._own.wipe()

    def move(self, name: str) -> None:
        self._ranks.tell(MoveDisk(name))
        self._own.move(name)

    def done(self) -> list[Done]:
        """Invariant: because every rank ends its writes in their order, so do all ranks together."""
        others = [self._others.popleft() for _ in range(len(self._others))]
        for one in others:
            if not one.ok:
                self._num_errors += 1
                if one.written:
                    self._silent_until_s = time.monotonic() + REST_S
        return [done for one in (*self._own.done(), *others) if (done := self._taken(one))]

    def _taken(self, one: Done) -> Done | None:
        """Returns the end of a read or write, if it goes on nowhere any more."""
        copy = one.copy
        if not one.ok:
            self._failed.add(copy)
        self._left[copy] -= 1
        if not one.written:
            self._ended_s = time.monotonic()
            self._half_s.setdefault(copy, self._ended_s)
        if self._left[copy]:
            return None
        del self._left[copy]
        self._reads.discard(copy)
        self._half_s.pop(copy, None)
        ok = copy not in self._failed
        self._failed.discard(copy)
        return Done(copy, one.written, ok)

    def read_s(self, num_blocks: int) -> float:
        if self._reads and time.monotonic() - min(self._ended_s, next(iter(self._half_s.values()), inf)) > LATE_S:
            return inf
        return self._own.read_s(num_blocks)

    def close(self) -> None:
        with suppress(RankLostError):  # what a lost rank had written stays
            told = self._ranks.tell(CloseDisk())
            self._own.close()
            self._ranks.wait_done(told, 2 * STOP_TIMEOUT_S)

    def _ended(self, done: Done) -> None:
        """Takes the end on another rank, on the thread that reads the reports."""
        self._others.append(done)
        self.wake()


class RankDisk:
    """What another rank does at rank 0's command."""

    def __init__(self, rank: int, tier: RankTier, layout: SlabLayout, on_ended: Callable[[Done], None]) -> None:
        """on_ended: called once per read or write, by any thread."""
        self._rank = rank
        self._tier = tier
        self._layout = layout
        self._on_ended = on_ended
        self._reporting = threading.Lock()
        self._disk: DiskKv | None = None  # None: its files cannot be opened

    def obey(self, command: DiskCommand) -> None:
        if isinstance(command, OpenDisk):
            self._open(Path(command.folder), command.num_slots)
        elif self._disk is not None:
            self._carry_out(self._disk, command)
        elif isinstance(command, WriteCopy | ReadCopy):
            self._on_ended(Done(command.copy, isinstance(command, WriteCopy), False))

    def _open(self, folder: Path, num_slots: int) -> None:
        host = self._tier.host
        windows = None
        try:
            files = RankFiles(folder, num_slots, host.slot_bytes, self._layout.block_size, self._rank)
            if self._layout.window_layers:
                windows = window_files(folder, num_slots, host, self._layout, self._rank)
        except OSError as error:
            log.warning("no disk tier for KV blocks", folder=str(folder), error=str(error))
            return
        self._disk = DiskKv(host, files, windows=windows)
        self._disk.wake = self._report

    def _carry_out(self, disk: DiskKv, command: DiskCommand) -> None:
        match command:
            case WriteCopy(slot, copy, block):
                disk.write(slot, copy, block)
            case ReadCopy(copy, slot, block):
                disk.read(copy, slot, block)
            case WipeDisk():
                disk.wipe()
            case MoveDisk(name):
                disk.move(name)
            case CloseDisk():
                disk.close()

    def _report(self) -> None:
        """Reports what has ended, on a thread of the disk."""
        with self._reporting:
            done = self._disk.done() if self._disk is not None else []
        for one in done:
            self._on_ended(one)
