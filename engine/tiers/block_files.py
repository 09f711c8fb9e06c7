"""The files of one worker's disk tier: `blocks` has the KV of one block in each slot, `index` a header for each slot.

Of a worker of several ranks, each rank has such a pair for its part of each block, in rank 0's folder. A block is found
when every rank has its header in the same slot. Likewise layers with a window have a pair of their own where they have
blocks of their own: the part of a block that lies there is one more block, with the same header.

A restart reads the index alone. A header holds a sum of itself and one of its block's bytes: what is damaged or
missing is gone, and nothing else. Because slots lie in two sparse files, only what was written takes room on the disk.

Both sums have a key, the file `secret` above all workers' folders, so that only who could read it can have written a
block that counts. Of the KV the sum is a keyed BLAKE2b of its GHASH, because a plain one takes 25 times as long. The
GHASH itself is stored nowhere: who knew it could compute its key.

Blocks pass through the page cache and are dropped from it: a read is not repeated while the block is in memory, and
direct I/O would need aligned host slots, and is refused by some file systems.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from hmac import compare_digest
from itertools import count
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from engine.blocks.disk_copies import DiskBlock
from runtime.own_files import SEEN, open_file, open_folder, opened_folder

FORMAT = 1  # of both files; written by one version and read by another
SUM_BYTES = 8
SECRET_BYTES = 32
FLUSH_BYTES = 32 << 20  # written at most before the disk has it, so that the page cache does not fill up


def header_struct(block_size: int) -> struct.Struct:
    """Sequence hash, parent, block hash, hash seed, order of writing, sum of the KV, kind, 1 without a parent, token
    ids. The sum of all these follows."""
    return struct.Struct(f"<6QBB6x{4 * block_size}s")


class RankFiles:
    """The files of one rank in a folder that rank 0 owns. One thread writes, others may read; a slot is not read and
    written at the same time."""

    def __init__(
        self, folder: Path, num_slots: int, block_bytes: int, block_size: int, rank: int, part: str = "", ranks: int = 1
    ) -> None:
        """folder: `parts of all workers/name/number`. part: of each block, if not all of it. ranks: how many are asked
        by found(). Raises OSError."""
        self.folder = folder
        self.num_slots = num_slots
        self._block_size = block_size
        self._header = header_struct(block_size)
        self._header_bytes = self._header.size + SUM_BYTES
        self._block_bytes = block_bytes
        self._rank, self._ranks, self._part = rank, ranks, part
        opened = _opened(folder)
        try:
            suffix = part + (f"-{rank}" if rank else "")
            self._index = self._open(f"index{suffix}", self._header_bytes, opened)
            self._blocks = self._open(f"blocks{suffix}", block_bytes, opened)
        finally:
            os.close(opened)
        self._key = _secret(folder.parent.parent)
        self._ghash = AESGCM(blake2b(b"GHASH", key=self._key, digest_size=SECRET_BYTES).digest())
        # Because a rank that dies in a move may leave the headers of former weights in a folder that has its new name
        # already, these do not count under another name.
        self._name = folder.parent.name.encode() if rank else b""
        self._order = 0  # of the youngest block
        self._unflushed = 0

    def _open(self, name: str, slot_bytes: int, folder: int) -> int:
        file = open_file(name, os.O_RDWR | os.O_CREAT, within=folder)
        if os.fstat(file).st_size > self.num_slots * slot_bytes:  # it was given more room before
            os.ftruncate(file, self.num_slots * slot_bytes)
        return file

    def headers(self) -> Iterator[tuple[int, int, DiskBlock]]:
        """(order of writing, slot, block). Raises OSError."""
        index = os.pread(self._index, os.fstat(self._index).st_size, 0)
        num_whole = os.fstat(self._blocks).st_size // self._block_bytes if self._block_bytes else self.num_slots
        for slot in range(min(num_whole, len(index) // self._header_bytes)):
            header = index[slot * self._header_bytes : (slot + 1) * self._header_bytes]
            if parsed := self._parsed(header):
                order, _, block = parsed
                yield order, slot, block

    def found(self) -> list[tuple[int, DiskBlock]]:
        """What an earlier process wrote on all ranks, by slot, the youngest first. Raises OSError."""
        found = sorted(self.headers(), reverse=True)
        self._order = found[0][0] if found else 0
        for rank in range(1, self._ranks):
            other = RankFiles(self.folder, self.num_slots, self._block_bytes, self._block_size, rank, self._part)
            theirs = {slot: block for _, slot, block in other.headers()}
            other.close()
            found = [entry for entry in found if theirs.get(entry[1]) == entry[2]]
        return [(slot, block) for _, slot, block in found]

    def write(self, slot: int, block: DiskBlock, kv: memoryview) -> None:
        """Raises OSError."""
        self._order += 1
        hashes = (block.sequence_hash, block.parent or 0, block.block_hash, block.seed)
        root = block.parent is None
        fields = self._header.pack(*hashes, self._order, self._kv_sum(kv), block.kind, root, block.tokens)
        _write(self._blocks, kv, slot * self._block_bytes)
        _write(self._index, fields + self._header_sum(fields), slot * self._header_bytes)
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
        return end == len(kv) and self._kv_sum(kv) == parsed[1]

    def wipe(self) -> None:
        """Raises OSError."""
        os.ftruncate(self._index, 0)
        os.ftruncate(self._blocks, 0)

    def move(self, parent: Path) -> None:
        """Wipes the files, which from now on are of that folder, where rank 0 moves them. Raises OSError."""
        self._name = parent.name.encode() if self._rank else b""
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
        """Order, sum of the KV, and the block; None when the header is damaged."""
        fields, header_sum = header[:-SUM_BYTES], header[-SUM_BYTES:]
        if len(header) < self._header_bytes or not compare_digest(self._header_sum(fields), header_sum):
            return None
        sequence_hash, parent, block_hash, seed, order, kv_sum, kind, root, tokens = self._header.unpack(fields)
        return order, kv_sum, DiskBlock(sequence_hash, None if root else parent, block_hash, seed, kind, tokens)

    def _header_sum(self, fields: bytes) -> bytes:
        return blake2b(self._part.encode() + self._name + fields, key=self._key, digest_size=SUM_BYTES).digest()

    def _kv_sum(self, kv: memoryview) -> int:
        ghash = self._ghash.encrypt(bytes(12), b"", kv)
        return int.from_bytes(blake2b(ghash, key=self._key, digest_size=SUM_BYTES).digest(), "little")


class BlockFiles(RankFiles):
    """The files of rank 0. Owns the first folder `parent/N` that no other worker owns; the lock ends with the
    process."""

    def __init__(self, parent: Path, nbytes: int, block_bytes: int, block_size: int, ranks: int = 1) -> None:
        """nbytes: of the files of all ranks, at most; block_bytes: of one rank's part. Raises OSError."""
        num_slots = nbytes // slot_bytes(block_bytes, block_size, ranks)
        folder, self._lock = _owned_folder(parent)
        try:
            super().__init__(folder, num_slots, block_bytes, block_size, rank=0, ranks=ranks)
        except OSError:
            os.close(self._lock)
            raise

    def move(self, parent: Path) -> None:
        """Wipes the files, and moves those of all ranks to that folder, beside the former one. Raises OSError."""
        self.wipe()
        former, everyone = self.folder, parent.parent
        with opened_folder(everyone) as top, opened_folder(parent.name, SEEN, top) as new:
            for number in count():
                try:
                    os.rename(former.relative_to(everyone), str(number), src_dir_fd=top, dst_dir_fd=new)
                    break
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another worker's
                        raise
            self.folder = parent / str(number)
            with suppress(OSError):  # others are there
                os.rmdir(former.parent.name, dir_fd=top)

    def _files(self) -> list[int]:
        return [*super()._files(), self._lock]  # the last one: names of files that are new


def _owned_folder(parent: Path) -> tuple[Path, int]:
    """The folder, and its lock, which is open as long as it is owned."""
    with opened_folder(parent.parent) as top, opened_folder(parent.name, SEEN, top) as named:
        for number in count():
            lock = open_folder(str(number), SEEN, named)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(lock)
                if not isinstance(error, BlockingIOError):
                    raise
            else:
                return parent / str(number), lock
    raise AssertionError("numbers do not end")


def _opened(folder: Path) -> int:
    """A descriptor of the folder of one worker, which is there."""
    with (
        opened_folder(folder.parent.parent, make=False) as top,
        opened_folder(folder.parent.name, SEEN, top, make=False) as parent,
    ):
        return open_folder(folder.name, SEEN, parent, make=False)


def _secret(folder: Path) -> bytes:
    """The key of the sums in this folder of all workers, which the first one makes. Raises OSError."""
    with opened_folder(folder, make=False) as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)  # until it is closed
        file = open_file("secret", os.O_RDWR | os.O_CREAT, within=opened)
        try:
            secret = os.pread(file, SECRET_BYTES, 0)
            if len(secret) < SECRET_BYTES:  # nothing there counts without it
                secret = os.urandom(SECRET_BYTES)
                _write(file, secret, 0)
                os.fsync(file)
        finally:
            os.close(file)
    return secret


def slot_bytes(block_bytes: int, block_size: int, ranks: int) -> int:
    """What a block takes in the files of all ranks. block_bytes: of one rank's part."""
    return ranks * (block_bytes + header_struct(block_size).size + SUM_BYTES)


def _write(file: int, data: memoryview | bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        num_bytes = os.pwrite(file, rest, offset)
        rest, offset = rest[num_bytes:], offset + num_bytes
