"""The books of the disk tier: which blocks have a copy on the disk, and the slots that reads and writes use.

A copy is a slot of the disk. Invariant: the parent of a block with a copy has one, because parents are written first.
Hence after a restart, whatever was in memory, the copies are whole prefixes; and when the disk is too slow, the ends of
prefixes are lost and not their beginnings. A block that comes back keeps its copy, and is written once.

Invariant: the host slot and the copy of a read or write belong to it until it ends, whatever happens to its block.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol


class DiskBlock(NamedTuple):
    """What is stored with a block's KV."""

    sequence_hash: int
    parent: int | None  # sequence hash
    block_hash: int
    seed: int  # hash seed, of a block without a parent; else 0
    kind: int
    tokens: bytes  # u32 LE


class Done(NamedTuple):
    """A read or write has ended."""

    copy: int
    written: bool  # else read
    ok: bool


class DiskTier(Protocol):
    """Files for blocks that have no room in host memory. Invariant: writes end in the order in which they were asked
    for. A read is ok when the copy holds exactly this block, undamaged. Ids of slots and copies are those of LowerTier:
    from their number on they are of parts that have a place."""

    num_slots: int
    num_window_slots: int  # for what blocks hold in layers with a window, where these have places
    wake: Callable[[], object]  # called on any thread when something has ended

    @property
    def num_errors(self) -> int:
        """Reads and writes that failed."""

    @property
    def block_s(self) -> float:
        """Seconds that a block takes to be read, by the last ones; 0: none was read."""

    @property
    def max_writes(self) -> int:
        """The most writes that may be on their way; 0 while the disk cannot be written."""

    def write(self, slot: int, copy: int, block: DiskBlock) -> None:
        """Begins to write a host slot's block to a copy."""

    def read(self, copy: int, slot: int, block: DiskBlock) -> None:
        """Begins to read a block into a host slot."""

    def done(self) -> list[Done]:
        """Returns the reads and writes that have ended since the last call."""

    def read_s(self, num_blocks: int) -> float:
        """Seconds until so many more blocks would be read; infinite when the disk does not answer."""

    def wipe(self) -> None:
        """Forgets all that was written, after the writes that were asked for."""

    def move(self, name: str) -> None:
        """Wipes, and goes on in the folder of that name; where that fails, writes nothing any more."""

    def close(self) -> None:
        """Ends, after all reads and writes that were asked for."""


class DiskCopies:
    """The books. Ids are block ids of PrefixCache: of host slots and of copies."""

    def __init__(self, copies: range) -> None:
        self.all = copies
        self.free = list(reversed(copies))
        self.of: dict[int, int] = {}  # sequence hash -> copy that is written, or is being written
        self.writes: dict[int, tuple[int, int]] = {}  # copy -> (source in host memory, sequence hash), oldest first
        self.reads: dict[int, tuple[int, int]] = {}  # copy -> (target in host memory, sequence hash)
        # Copies whose blocks lie on the disk -> host slots that have their content, too: those that other blocks may
        # take, the oldest first, and those that somebody waits with.
        self.staged: dict[int, int] = {}
        self.held: dict[int, int] = {}
        self.sources: set[int] = set()  # host slots that are being written
        self.to_write: list[tuple[int, int, DiskBlock]] = []  # (source, copy, block); the owner empties both
        self.to_read: list[tuple[int, int, DiskBlock]] = []  # (copy, target, block)

    def content(self, copy: int) -> int | None:
        """The host slot with the copy's content, if there is one."""
        if copy in self.writes:
            return self.writes[copy][0]
        return self.held.get(copy, self.staged.get(copy))

    def hold(self, copy: int) -> None:
        """The host slot with the copy's content is not for other blocks, from now on until let_go()."""
        if copy in self.staged:
            self.held[copy] = self.staged.pop(copy)

    def let_go(self, copy: int) -> None:
        if copy in self.held:
            self.staged[copy] = self.held.pop(copy)

    def unstage(self, copy: int) -> int | None:
        """The copy has no content in host memory any more. Returns the slot that comes free."""
        return self.held.pop(copy, self.staged.pop(copy, None))

    def begin_write(self, source: int, block: DiskBlock) -> None:
        copy = self.free.pop()
        self.of[block.sequence_hash] = copy
        self.writes[copy] = source, block.sequence_hash
        self.sources.add(source)
        self.to_write.append((source, copy, block))

    def begin_read(self, copy: int, target: int, block: DiskBlock) -> None:
        self.reads[copy] = target, block.sequence_hash
        self.to_read.append((copy, target, block))

    def end_write(self, copy: int) -> tuple[int, int]:
        """Returns the source and the block's sequence hash."""
        source, sequence_hash = self.writes.pop(copy)
        self.sources.remove(source)
        self._freed(copy, sequence_hash)
        return source, sequence_hash

    def end_read(self, copy: int) -> int:
        """Returns the target."""
        target, sequence_hash = self.reads.pop(copy)
        self._freed(copy, sequence_hash)
        return target

    def _freed(self, copy: int, sequence_hash: int) -> None:
        if self.of.get(sequence_hash) != copy:  # the block was forgotten meanwhile
            self.free.append(copy)

    def drop(self, sequence_hash: int) -> int | None:
        """A block loses its copy, if it has one. Returns a host slot that comes free with that."""
        copy = self.of.pop(sequence_hash, None)
        if copy is None:
            return None
        if copy not in self.writes and copy not in self.reads:
            self.free.append(copy)
        return self.unstage(copy)

    def check_integrity(self) -> list[str]:
        """What is wrong with the books, in sentences."""
        problems = ["a read or write was not begun"] if self.to_write or self.to_read else []
        used = {*self.of.values(), *self.writes, *self.reads}
        if len(used) < len(self.of) or sorted([*self.free, *used]) != list(self.all):
            problems.append("the slots of the disk are not those that are free, hold a copy or are being used")
        if self.sources != {source for source, _ in self.writes.values()}:
            problems.append("the host slots that are being written are not those of the writes")
        return problems
