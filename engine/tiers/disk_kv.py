"""KV blocks on a disk: a third home for prefixes, below host memory, that outlives the process."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from queue import SimpleQueue

import structlog
import xxhash

from engine.blocks.disk_copies import DiskBlock, Done
from engine.tiers.block_files import FORMAT, BlockFiles, RankFiles, slot_bytes
from engine.tiers.host_kv import KEY as HOST_KEY, HostTier
from engine.tiers.read_times import ReadTimes
from kvtransfer.slab.layout import SlabLayout
from runtime.config.serving import EngineConfig, parse_bytes
from runtime.errors import ConfigError
from runtime.own_files import make_folder

KEY = "engine.disk_kv"
WRITES_BYTES = 256 << 20  # on their way, at most: what the disk writes during some steps
LATE_S = 2.0  # a read that takes longer is not waited for, and none is begun
READERS = max(2, min(8, len(os.sched_getaffinity(0)) // 2))  # threads: what a quick disk and a checksum of it take
REST_S = 30.0  # how long nothing is written after an error
STOP_TIMEOUT_S = 10.0

Job = Callable[[], object]

log = structlog.get_logger()


class DiskKv:
    """Implements `engine.blocks.disk_copies.DiskTier`. The engine thread calls it, and never waits for the disk: one
    thread writes and some read, each a whole block into its host slot, and compute its checksum. `wake` is called by
    these threads when something has ended. Invariant: a read or write ends and its thread goes on, whatever is raised.
    """

    def __init__(
        self, host: HostTier, files: RankFiles, num_readers: int = READERS, windows: RankFiles | None = None
    ) -> None:
        """windows: files of layers with a window, where these have blocks of their own."""
        self.files = files
        self.num_slots = files.num_slots
        self.num_window_slots = windows.num_slots if windows is not None else 0
        self._all_files = [files] if windows is None else [windows, files]
        self.num_errors = 0
        self.wake: Callable[[], object] = lambda: None
        self._host = host
        self._most_writes = max(
            2, min(WRITES_BYTES // max(1, host.slot_bytes + host.window_slot_bytes), host.num_slots // 4)
        )
        self._silent_until_s = 0.0
        self._num_reads = 0  # on their way
        self._times = ReadTimes()
        self._counting = threading.Lock()
        self._done: deque[Done] = deque()
        self._writes, self._reads = SimpleQueue[Job | None](), SimpleQueue[Job | None]()
        self._threads = [
            threading.Thread(target=_work, args=(jobs,), name=name, daemon=True)
            for name, jobs in (("kv to disk", self._writes), *[("kv from disk", self._reads)] * num_readers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def block_s(self) -> float:
        return self._times.block_s

    @property
    def max_writes(self) -> int:
        return self._most_writes if time.monotonic() >= self._silent_until_s else 0

    def write(self, slot: int, copy: int, block: DiskBlock) -> None:
        self._writes.put(partial(self._write, slot, copy, block))

    def read(self, copy: int, slot: int, block: DiskBlock) -> None:
        self._num_reads += 1
        self._reads.put(partial(self._read, copy, slot, block))

    def wipe(self) -> None:
        for files in self._all_files:
            self._writes.put(partial(self._tried, files.wipe))

    def move(self, name: str) -> None:
        def move() -> None:
            to = self.files.folder.parent.parent / name
            moved = all(self._tried(partial(files.move, to)) for files in self._all_files)
            self._silent_until_s = 0.0 if moved else inf  # for ever: the folder still names the former weights

        self._writes.put(move)

    def done(self) -> list[Done]:
        done = [self._done.popleft() for _ in range(len(self._done))]
        self._num_reads -= sum(not one.written for one in done)
        return done

    def read_s(self, num_blocks: int) -> float:
        if self._times.longest_s(time.monotonic()) > LATE_S:
            return inf
        return (self._num_reads + num_blocks) * self.block_s

    def close(self) -> None:
        """Ends the threads, when they have done what they were asked for, and what was written is on the disk. One that
        hangs is left alone."""
        for files in self._all_files:
            self._writes.put(partial(self._tried, files.sync))
        self._writes.put(None)
        for _ in self._threads[1:]:
            self._reads.put(None)
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            for files in self._all_files:
                files.close()

    # --- on the threads -----------------------------------------------------------------------------------------------

    def _write(self, slot: int, copy: int, block: DiskBlock) -> None:
        files, at = self._files_of(copy)
        ok = self.max_writes > 0 and self._tried(lambda: files.write(at, block, self._host.content(slot)))
        self._end(Done(copy, True, ok))

    def _read(self, copy: int, slot: int, block: DiskBlock) -> None:
        self._times.begin(copy, time.monotonic())
        problem = "it is damaged"
        try:
            files, at = self._files_of(copy)
            ok = files.read(at, block, self._host.content(slot))
        except Exception as error:
            ok, problem = False, repr(error)
        self._times.end(copy, time.monotonic())
        if not ok:
            self._count_error()
            log.warning("a KV block of the disk cannot be used", error=problem, folder=self._folder, slot=copy)
        self._end(Done(copy, False, ok))

    def _files_of(self, copy: int) -> tuple[RankFiles, int]:
        """The files of a copy, and its slot there."""
        return (self.files, copy) if copy < self.num_slots else (self._all_files[0], copy - self.num_slots)

    def _tried(self, work: Job) -> bool:
        """Whether it went well. Nothing is written for some time after an error."""
        try:
            work()
        except Exception as error:
            self._count_error()
            if self.max_writes:
                log.warning("KV blocks go to no disk for now", folder=self._folder, error=repr(error))
            self._silent_until_s = max(self._silent_until_s, time.monotonic() + REST_S)
            return False
        return True

    def _count_error(self) -> None:
        with self._counting:
            self.num_errors += 1

    def _end(self, done: Done) -> None:
        self._done.append(done)
        self.wake()

    @property
    def _folder(self) -> str:
        return str(self.files.folder)


def _work(jobs: "SimpleQueue[Job | None]") -> None:
    while job := jobs.get():
        job()


def disk_kv(
    host: HostTier | None, layout: SlabLayout, config: EngineConfig, model_hash: str
) -> tuple[DiskKv | None, list[tuple[int, DiskBlock]]]:
    """Opens rank 0's disk tier as configured. Returns the tier and what it finds, the youngest first; None without a
    folder, or when the folder cannot be used: the worker serves without it. Raises ConfigError."""
    check_disk_kv(config)
    if host is None or config.disk_kv.folder is None:
        return None, []
    ranks = config.tensor_parallel
    folder = Path(config.disk_kv.folder) / fingerprint(layout, model_hash, ranks)
    per_slot, per_window = (
        slot_bytes(size, layout.block_size, ranks) for size in (host.slot_bytes, host.window_slot_bytes)
    )
    whole = layout.num_blocks * per_slot + layout.num_window_blocks * per_window  # what all of the slab takes
    num_slots, windows = parse_bytes(config.disk_kv.size, KEY) * layout.num_blocks // whole, None
    try:
        files = BlockFiles(folder, num_slots * per_slot, host.slot_bytes, layout.block_size, ranks)
        found = files.found()
        if layout.window_layers:
            windows = window_files(files.folder, files.num_slots, host, layout, 0, ranks)
            found += [(slot + files.num_slots, block) for slot, block in windows.found()]
    except OSError as error:
        log.warning("no disk tier for KV blocks", folder=str(folder), error=str(error))
        return None, []
    if not files.num_slots:
        least = -(-whole // layout.num_blocks)
        raise ConfigError(f"{KEY}.size", f"{config.disk_kv.size} has no room for a KV block, {least} bytes")
    log.info("disk tier for KV blocks", folder=str(files.folder), slots=files.num_slots, found=len(found))
    return DiskKv(host, files, windows=windows), found


def window_files(
    folder: Path, num_slots: int, host: HostTier, layout: SlabLayout, rank: int, ranks: int = 1
) -> RankFiles:
    """A rank's files of layers with a window, in the slab's proportion to its `num_slots`. Raises OSError."""
    num_windows = num_slots * layout.num_window_blocks // layout.num_blocks
    return RankFiles(folder, num_windows, host.window_slot_bytes, layout.block_size, rank, "-windows", ranks)


def fingerprint(layout: SlabLayout, model_hash: str, ranks: int) -> str:
    """Names the folder of all workers whose blocks hold the same bytes for the same tokens. layout: one rank's."""
    shape = (layout.dtype, layout.num_layers, layout.num_kv_heads, layout.block_size, layout.head_dim)
    parts = [ranks] if ranks > 1 else []
    meaning = (FORMAT, model_hash, shape, *parts, *([sorted(layout.window_layers)] if layout.window_layers else []))
    name: str = xxhash.xxh3_128_hexdigest(repr(meaning).encode())
    return name


def check_disk_kv(config: EngineConfig) -> None:
    """Raises ConfigError where there is no such tier."""
    if config.disk_kv.folder is None:
        return
    if config.host_kv_memory.strip() == "0":
        raise ConfigError(KEY, f"blocks go to the disk and come back through host memory: set {HOST_KEY} too")
    parse_bytes(config.disk_kv.size, f"{KEY}.size")


def check_folder(config: EngineConfig) -> None:
    """Makes the folder on this machine. Raises ConfigError when it cannot be used."""
    if config.disk_kv.folder is None:
        return
    make_folder(Path(config.disk_kv.folder).expanduser(), f"{KEY}.folder")
