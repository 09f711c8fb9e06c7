"""Who holds how much of each edge of the radix tree, and where: what the bits of the edges' masks mean.

A worker has a bit for what it holds anywhere. A worker that has told of lower homes has further bits, for what lies on
the device and for what lies in host memory or nearer. Because the parent of a block lies at least as near as the block,
each of these is a prefix of every path, like what the worker holds. A worker without lower homes costs nothing more.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import compress, pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton_proto.kv_events import DISK, HASH_BYTES
from router.index.edge import Edge
from router.index.roster import NOBODY, Roster
from runtime.discovery.worker_key import WorkerKey

UNKNOWN: Final[tuple[int, ...]] = ()


class Held(NamedTuple):
    """Blocks of one worker."""

    blocks: int
    host: int = 0  # of them, in host memory
    disk: int = 0


class Holders(Roster):
    """A worker's number is the bit of what it holds anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.nearer = 0  # mask of the bits of workers for homes above their lowest
        self._bits: dict[WorkerKey, tuple[int, ...]] = {}  # the nearest home first
        self._bytes: list[int] = []  # by bit: coverage, summed over edges
        self._numbers_at: NDArray[np.intp] | None = None  # see numbers_at

    def bits(self, worker: WorkerKey) -> tuple[int, ...]:
        """One for what lies on the device, perhaps one for host memory or nearer, and the last for all that the worker
        holds. UNKNOWN for a worker that is not in the roster. A worker with a single bit holds all on the device."""
        return self._bits.get(worker, UNKNOWN)

    def add(self, worker: WorkerKey) -> int:
        number = super().add(worker)
        if worker not in self._bits:
            self._set_bits(worker, (number,))
        return number

    def discard(self, worker: WorkerKey) -> None:
        """The worker must not cover anything."""
        super().discard(worker)
        for bit in self._bits.pop(worker, UNKNOWN)[:-1]:
            self.nearer &= ~(1 << bit)
            self._free.append(bit)
        self._numbers_at = None

    def distinguish(self, worker: WorkerKey, home: int, root: Edge) -> tuple[int, ...]:
        """The bits of a known worker, at least so many that one means `home`. What the worker holds in the tree below
        `root` lies in homes that it has told of already."""
        while len(found := self._bits[worker]) <= home:
            bit, anywhere = self._take_number(worker), found[-1]
            self.nearer |= 1 << bit
            self._set_bits(worker, (*found[:-1], bit, anywhere))
            stack = [root]
            while stack:
                for child in (stack.pop().children or {}).values():
                    if covered := child.covered(anywhere):
                        self.cover(child, (bit,), covered)
                        stack.append(child)
        return found

    def _set_bits(self, worker: WorkerKey, numbers: tuple[int, ...]) -> None:
        self._bits[worker] = numbers
        self._bytes += [0] * (len(self.names) - len(self._bytes))
        self._numbers_at = None

    # --- coverage -----------------------------------------------------------------------------------------------------

    def cover(self, edge: Edge, numbers: Iterable[int], length: int) -> None:
        """Raises the coverage of some bits to `length` bytes."""
        for bit in numbers:
            self._bytes[bit] += edge.cover(bit, length)

    def extend(self, numbers: Iterable[int], length: int) -> None:
        """An edge became longer by `length` bytes, or a new one was made, which these bits cover."""
        for bit in numbers:
            self._bytes[bit] += length

    def uncover(self, edge: Edge, numbers: Iterable[int], length: int, touched: dict[Edge, None]) -> None:
        """Lowers the coverage of some bits to `length` bytes and drops all that they cover behind. The structure is
        left to EdgeTable.tidy."""
        touched[edge] = None
        for bit in numbers:
            had_all = edge.full >> bit & 1
            self._bytes[bit] -= edge.uncover(bit, length)
            stack = [edge] if had_all else []
            while stack:
                for child in (stack.pop().children or {}).values():
                    if fell := child.uncover(bit, 0):
                        self._bytes[bit] -= fell
                        touched[child] = None
                        stack.append(child)

    # --- questions ----------------------------------------------------------------------------------------------------

    def held(self, worker: WorkerKey) -> Held:
        return _held(self._bytes[bit] for bit in self.bits(worker))

    def owners(self, edge: Edge) -> dict[WorkerKey, Held]:
        """What each worker holds of an edge; workers without any are left out."""
        own = bits(edge.full & ~self.nearer)
        found = dict.fromkeys(compress(self.names, own.tobytes()), Held(len(edge.blocks) // HASH_BYTES))
        for bit, covered in (edge.partial or {}).items():
            found[self.names[bit]] = Held(covered // HASH_BYTES)  # of a worker with several bits, what follows holds
        for worker, numbers in self._bits.items() if self.nearer else ():
            if len(numbers) > 1 and worker in found:
                found[worker] = _held(edge.covered(bit) for bit in numbers)
        return found

    def numbers_at(self) -> NDArray[np.intp]:
        """The bit of each worker for each home, by the worker's number: [homes, n + 1]; the last column is NOBODY's."""
        if self._numbers_at is None:
            self._numbers_at = np.full((DISK + 1, len(self.names) + 1), NOBODY, dtype=np.intp)
            for numbers in self._bits.values():
                for home in range(DISK + 1):
                    self._numbers_at[home, numbers[-1]] = numbers[min(home, len(numbers) - 1)]
        return self._numbers_at


@lru_cache(maxsize=4096)  # the same few fleets hold most edges
def bits(mask: int) -> NDArray[np.bool_]:
    """The mask as an array [bits], lowest bit first; the highest bit that is set is the last."""
    packed = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), dtype=np.uint8)
    found = np.unpackbits(packed, count=mask.bit_length(), bitorder="little").view(np.bool_)
    found.flags.writeable = False
    return found


def _held(covered: Iterable[int]) -> Held:
    """covered: bytes by bit, the nearest home first; none for a worker that holds nothing."""
    blocks = [length // HASH_BYTES for length in covered] or [0]
    return Held(blocks[-1], *_differences(blocks))


def _differences(values: Iterable[int]) -> Iterator[int]:
    return (later - earlier for earlier, later in pairwise(values))
