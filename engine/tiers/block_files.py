"""The files of one worker's disk tier: `blocks` has the KV of one block in each slot, `index` a header for each slot.

Of a worker of several ranks, each rank has such a pair for its part of each block, in rank 0's folder. A block is found
when every rank has its header in the same slot.

A restart reads the index alone. A header holds a checksum of itself and one of its block's bytes: what is damaged or
missing is gone, and nothing else. Because slots lie in two sparse files, only what was written takes room on the disk.

Blocks pass through the page cache and are dropped from it: a read is not repeated while the block is in memory, and
direct I/O would need aligned host slots, and is refused by some file systems.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import xxhash

from engine.core.disk_copies import DiskBlock

FORMAT = 1  # of both files; written by one version and read by another
SUM_BYTES = 8
FLUSH_BYTES = 32 << 20  # written at most before the disk has it, so that the page cache does not fill up


def header_struct(block_size: int) -> struct.Struct:
    """Sequence hash, parent, block hash, hash seed, order of writing, checksum of the KV, kind, 1 without a parent,
    token ids. The checksum of all these follows."""
    return struct.Struct(f"<6QBB6x{4 * block_size}s")


class RankFiles:
    """The files of one rank in a folder that rank 0 owns. One thread writes, others may read; a slot is not read and
    written at the same time."""

    def __init__(self, folder: Path, num_slots: int, block_bytes: int, block_size: int, rank: int) -> None:
        """Raises OSError."""
        self.folder = folder
        self.num_slots = num_slots
        self._header = header_struct(block_size)
        self._header_bytes = self._header.size + SUM_BYTES
        self._block_bytes = block_bytes
        self._rank = rank
        # Because a rank that dies in a move may leave the headers of former weights in a folder that has its new name
        # already, these do not count under another name.
        self._sum_seed = name_sum(folder.parent) if rank else 0
        suffix = f"-{rank}" if rank else ""
        self._index = self._open(f"index{suffix}", self._header_bytes)
        self._blocks = self._open(f"blocks{suffix}", block_bytes)
        self._order = 0  # of the youngest block
        self._unflushed = 0

    def _open(self, name: str, slot_bytes: int) -> int:
        file = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if os.fstat(file).st_size > self.num_slots * slot_bytes:  # it was given more room before
            os.ftruncate(file, self.num_slots * slot_bytes)
        return file

    def headers(self) -> Iterator[tuple[int, int, DiskBlock]]:
        """(order of writing, slot, block). Raises OSError."""
        index = os.pread(self._index, os.fstat(self._index).st_size, 0)
        num_whole = os.fstat(self._blocks).st_size // self._block_bytes
        for slot in range(min(num_whole, len(index) // self._header_bytes)):
            header = index[slot * self._header_bytes : (slot + 1) * self._header_bytes]
            if parsed := self._parsed(header):
                order, _, block = parsed
                yield order, slot, block

    def write(self, slot: int, block: DiskBlock, kv: memoryview, kv_sum: int | None = None) -> None:
        """kv_sum: what the checksum of `kv` should be; None: what it is. Raises OSError."""
        self._order += 1
        parent = block.parent or 0
        hashes = (block.sequence_hash, parent, block.block_hash, block.seed)
        root = block.parent is None
        fields = self._header.pack(
            *hashes, self._order, _sum(kv) if kv_sum is None else kv_sum, block.kind, root, block.tokens
        )
        _write(self._blocks, kv, slot * self._block_bytes)
        header_sum = _sum(fields, self._sum_seed).to_bytes(SUM_BYTES, "little")
        _write(self._index, fields + header_sum, slot * self._header_bytes)
        self._unflushed += self._block_bytes
        if self._unflushed >= FLUSH_BYTES:
            self._unflushed = 0
            os.fdatasync(self._blocks)
            os.posix_fadvise(self._blocks, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, slot: int, block: DiskBlock, kv: memoryview) -> bool:
        """Fills `kv`. Returns whether the slot holds exactly this block, undamaged. Raises OSError."""
        parsed = self._parsed(os.pread(self._index, self._header_bytes, slot * self._header_bytes))
        if parsed is None or parsed[2]._replace(kind=block.kind) != block:
            return False
        start, end = slot * self._block_bytes, 0
        while end < len(kv) and (num_bytes := os.preadv(self._blocks, [kv[end:]], start + end)):
            end += num_bytes
        os.posix_fadvise(self._blocks, start, len(kv), os.POSIX_FADV_DONTNEED)
        return end == len(kv) and _sum(kv) == parsed[1]

    def wipe(self) -> None:
        """Raises OSError."""
        os.ftruncate(self._index, 0)
        os.ftruncate(self._blocks, 0)

    def move(self, parent: Path) -> None:
        """Wipes the files, which from now on are of that folder, where rank 0 moves them. Raises OSError."""
        self._sum_seed = name_sum(parent)
        self.wipe()

    def sync(self) -> None:
        """Returns when all that was written would outlive the machine. Raises OSError.

        Blocks get that far every FLUSH_BYTES, headers when the kernel writes them back, within about 30 s. Because each
        header is checked with its block, a machine that loses power before loses the youngest blocks and nothing else.
        """
        for file in self._files():
            os.fsync(file)

    def close(self) -> None:
        for file in self._files():
            os.close(file)

    def _files(self) -> list[int]:
        return [self._blocks, self._index]

    def _parsed(self, header: bytes) -> tuple[int, int, DiskBlock] | None:
        """Order, checksum of the KV, and the block; None when the header is damaged."""
        fields, checksum = header[:-SUM_BYTES], header[-SUM_BYTES:]
        if len(header) < self._header_bytes or _sum(fields, self._sum_seed) != int.from_bytes(checksum, "little"):
            return None
        sequence_hash, parent, block_hash, seed, order, kv_sum, kind, root, tokens = self._header.unpack(fields)
        return order, kv_sum, DiskBlock(sequence_hash, None if root else parent, block_hash, seed, kind, tokens)


class BlockFiles(RankFiles):
    """The files of rank 0. Owns the first folder `parent/N` that no other worker owns; the lock ends with the
    process."""

    def __init__(self, parent: Path, nbytes: int, block_bytes: int, block_size: int, ranks: int = 1) -> None:
        """nbytes: of the files of all ranks, at most; block_bytes: of one rank's part. Raises OSError."""
        num_slots = nbytes // (ranks * (block_bytes + header_struct(block_size).size + SUM_BYTES))
        folder, self._lock = _owned_folder(parent)
        self._shape = num_slots, block_bytes, block_size
        self._ranks = ranks
        super().__init__(folder, *self._shape, rank=0)

    def found(self) -> list[tuple[int, DiskBlock]]:
        """What an earlier process wrote on all ranks, by slot, the youngest first. Raises OSError."""
        found = sorted(self.headers(), reverse=True)
        self._order = found[0][0] if found else 0
        for rank in range(1, self._ranks):
            other = RankFiles(self.folder, *self._shape, rank)
            theirs = {slot: block for _, slot, block in other.headers()}
            other.close()
            found = [entry for entry in found if theirs.get(entry[1]) == entry[2]]
        return [(slot, block) for _, slot, block in found]

    def move(self, parent: Path) -> None:
        """Wipes the files, and moves those of all ranks to that folder. Raises OSError."""
        self.wipe()
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in count():
            try:
                former, self.folder = self.folder, self.folder.rename(parent / str(number))
                break
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another worker's
                    raise
        with suppress(OSError):  # others are there
            former.parent.rmdir()

    def _files(self) -> list[int]:
        return [*super()._files(), self._lock]  # the last one: names of files that are new


def _owned_folder(parent: Path) -> tuple[Path, int]:
    """The folder, and its lock, which is open as long as it is owned."""
    for number in count():
        folder = parent / str(number)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if not isinstance(error, BlockingIOError):
                raise
        else:
            return folder, lock
    raise AssertionError("numbers do not end")


def _write(file: int, data: memoryview | bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        num_bytes = os.pwrite(file, rest, offset)
        rest, offset = rest[num_bytes:], offset + num_bytes


def name_sum(folder: Path) -> int:
    return _sum(folder.name.encode())


def _sum(data: memoryview | bytes, seed: int = 0) -> int:
    checksum: int = xxhash.xxh3_64_intdigest(data, seed)
    return checksum
