"""Which worker holds which prefix: a path-compressed tree over block hashes. No I/O and no clock here.

Workers' KV events change the tree; `find` answers with the block hashes of a prompt. Per edge, a worker covers nothing,
the whole run, or its first blocks: because a worker evicts leaves first, it always holds a prefix of every path. Full
coverage of an edge is one bit of a mask. See holders.py for the homes of blocks.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from baton_proto.kv_events import DEVICE, HASH_BYTES, Cleared, KvEvent, Moved, Removed, Stored
from router.index.block_index import NOWHERE
from router.index.edge import HASH, Edge, common_bytes, common_end, find_hash
from router.index.edge_table import EdgeTable
from router.index.holders import UNKNOWN, Held, Holders
from router.index.match import Match
from runtime.discovery.worker_key import WorkerKey
from runtime.errors import ProtocolError


class UnknownBlockError(ProtocolError):
    """An event names blocks that its worker does not hold, as far as the tree knows."""

    def __init__(self, worker: WorkerKey, what: str, count: int) -> None:
        self.count = count
        super().__init__(f"worker {worker[0]}", f"{what}: {count} block(s) that it does not hold")


class RadixTree:
    def __init__(self) -> None:
        self._edges = EdgeTable()
        self._holders = Holders()

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that at least one worker holds."""
        return self._edges.num_blocks

    @property
    def num_edges(self) -> int:
        return self._edges.num_edges

    @property
    def workers(self) -> list[WorkerKey]:
        return list(self._holders)

    def held(self, worker: WorkerKey) -> Held:
        """All that the worker holds."""
        return self._holders.held(worker)

    def num_blocks_of(self, worker: WorkerKey) -> int:
        return self.held(worker).blocks

    def find(self, block_hashes: NDArray[np.uint64]) -> Match:
        """Longest cached prefix per worker of a prompt's block hashes [num_blocks]."""
        query = block_hashes.tobytes()
        edge, position, length = self._edges.root, 0, 0
        levels: list[tuple[int, int]] = []
        alone: list[tuple[int, int]] = []
        while edge.children is not None:  # Run.step, spelled out: calling it takes 10 % longer
            child = edge.children.get(query[position : position + HASH_BYTES])
            if child is None:
                break
            length = len(child.blocks)
            if not query.startswith(child.blocks, position):
                length = common_bytes(child.blocks, 0, query, position)
            ended = (
                edge.full & ~child.full if position else 0
            )  # workers that hold the edge before and nothing of this one
            if child.partial:
                for bit, covered in child.partial.items():
                    alone.append(((position + min(covered, length)) // HASH_BYTES, bit))
                    ended &= ~(1 << bit)
            if ended:
                levels.append((position // HASH_BYTES, ended))
            edge, position = child, position + length
            if length < len(child.blocks):
                break
        if position and edge.full:
            levels.append((position // HASH_BYTES, edge.full))
        return Match(levels, alone, self._holders, edge.sequences, length)

    def apply(self, worker: WorkerKey, event: KvEvent) -> None:
        """Raises ProtocolError when the event contradicts the tree, see the methods below."""
        match event:
            case Stored():
                self.apply_stored(worker, event.parent, event.block_hashes, event.sequence_hashes, event.home)
            case Removed():
                self.apply_removed(worker, event.sequence_hashes)
            case Moved():
                self.apply_moved(worker, event.sequence_hashes, event.home)
            case Cleared():
                self.clear(worker)

    def apply_stored(
        self, worker: WorkerKey, parent: int | None, blocks: bytes, sequences: bytes, home: int = DEVICE
    ) -> None:
        """The worker holds a run of blocks (u64 LE hashes), the first one being the child of the block `parent`. Those
        that it holds nearer than `home` stay there.

        Raises UnknownBlockError when the worker does not hold the parent that near, ProtocolError when the hashes
        contradict the tree; the tree is unchanged then.
        """
        if len(blocks) != len(sequences) or len(blocks) % HASH_BYTES or not blocks:
            raise ProtocolError(f"worker {worker[0]}", "a stored run needs as many sequence as block hashes")
        bits = self._bits(worker, home)
        edge, offset = self._after_parent(worker, bits, parent)
        covered: list[Edge] = []
        position = 0
        while True:
            shared = common_bytes(edge.blocks, offset, blocks, position)
            if edge.sequences[offset : offset + shared] != sequences[position : position + shared]:
                raise ProtocolError(f"worker {worker[0]}", "a stored run names known blocks differently")
            offset, position = offset + shared, position + shared
            child: Edge | None = None
            if offset == len(edge.blocks) and edge.children is not None:
                child = edge.children.get(blocks[position : position + HASH_BYTES])
            if child is None:
                break
            covered.append(edge)
            edge, offset = child, 0
        new = sequences[position:]
        number = self._edges.enter(edge, offset, _mask(bits), new) if new else NOWHERE
        if new and number == NOWHERE:
            raise ProtocolError(f"worker {worker[0]}", "a stored run has sequence hashes that name other blocks")
        if bits is UNKNOWN:
            self._holders.add(worker)
            bits = self._bits(worker, home)
        for passed in covered:
            self._holders.cover(passed, bits, len(passed.blocks))
        self._holders.cover(edge, bits, offset)
        if new:
            self._holders.extend(bits, len(new))
            self._edges.attach(edge, offset, _mask(bits), blocks[position:], new, number)
        first = covered[0] if covered else edge
        for joinable in (first.parent, *covered, edge):
            self._edges.join(joinable)

    def apply_removed(self, worker: WorkerKey, sequences: bytes) -> None:
        """The worker dropped blocks (u64 LE sequence hashes); the blocks behind them are gone with them.

        Raises UnknownBlockError when the worker does not hold some of them; the others are removed.
        """
        if len(sequences) % HASH_BYTES:
            raise ProtocolError(f"worker {worker[0]}", "removed hashes are not a whole number of u64")
        num_hashes = len(sequences) // HASH_BYTES
        if not num_hashes:
            return
        bits = self._holders.bits(worker)
        if bits is UNKNOWN:
            raise UnknownBlockError(worker, "removed", num_hashes)
        touched: dict[Edge, None] = {}
        unknown = 0
        climbing = np.frombuffer(sequences, dtype=HASH)[::-1].tobytes()  # leaves last, the order of edges
        end = len(climbing)
        while end:
            gone = self._remove_last(bits, climbing, end, touched)
            if not gone:
                unknown, gone = unknown + 1, HASH_BYTES
            end -= gone
        self._edges.tidy(touched)
        if unknown:
            raise UnknownBlockError(worker, "removed", unknown)

    def apply_moved(self, worker: WorkerKey, sequences: bytes, home: int) -> None:
        """Blocks of the worker (u64 LE sequence hashes) lie in `home` now. Behind a block that moves away, nothing
        stays nearer than it is.

        Raises UnknownBlockError when the worker does not hold some of them, or not the parent of one that comes nearer
        that near; the others are moved.
        """
        if len(sequences) % HASH_BYTES:
            raise ProtocolError(f"worker {worker[0]}", "moved hashes are not a whole number of u64")
        if not sequences:
            return
        if self._holders.bits(worker) is UNKNOWN:
            raise UnknownBlockError(worker, "moved", len(sequences) // HASH_BYTES)
        bits = self._holders.distinguish(worker, home, self._edges.root)
        touched: dict[Edge, None] = {}
        unknown = position = 0
        climbing = np.frombuffer(sequences, dtype=HASH)[::-1].tobytes()
        while position < len(sequences):
            moved = self._move_first(bits, home, sequences, position, climbing, touched)
            if not moved:
                unknown, moved = unknown + 1, HASH_BYTES
            position += moved
        self._edges.tidy(touched)
        if unknown:
            raise UnknownBlockError(worker, "moved", unknown)

    def clear(self, worker: WorkerKey) -> None:
        """The worker holds nothing any more."""
        touched: dict[Edge, None] = {}
        self._holders.uncover(self._edges.root, self._holders.bits(worker), 0, touched)
        self._edges.tidy(touched)

    def remove_worker(self, worker: WorkerKey) -> None:
        """Forgets the worker. Nothing happens when it is not known."""
        self.clear(worker)
        self._holders.discard(worker)

    def dump(self, worker: WorkerKey) -> Iterator[Stored]:
        """The worker's runs, parents before children. The tree must not change meanwhile."""
        bits = self._holders.bits(worker)
        stack = list((self._edges.root.children or {}).values()) if bits else []
        while stack:
            edge = stack.pop()
            assert edge.parent is not None, "only the root has no parent"
            covered = 0
            for home, bit in enumerate(bits):
                begin, covered = covered, edge.covered(bit)
                if covered > begin:
                    before = edge.sequences[:begin][-HASH_BYTES:] or edge.parent.sequences[-HASH_BYTES:]
                    parent = int.from_bytes(before, "little") if before else None
                    yield Stored(parent, edge.blocks[begin:covered], edge.sequences[begin:covered], home)
            if covered == len(edge.blocks) and edge.children is not None:
                stack.extend(edge.children.values())

    def children(self, edge: Edge | None = None) -> list[Edge]:
        """The edges right behind an edge; None: those that start at token 0. Edges are valid until the tree changes."""
        return list(((edge or self._edges.root).children or {}).values())

    def owners(self, edge: Edge) -> dict[WorkerKey, Held]:
        """What each worker holds of an edge; workers without any are left out."""
        return self._holders.owners(edge)

    def locate(self, sequence: bytes) -> tuple[Edge, int] | None:
        """The edge that holds a block (u64 LE sequence hash), and the number of the edge's blocks up to its end."""
        edge = self._edges.holding(int.from_bytes(sequence, "little"))
        return None if edge is None else (edge, find_hash(edge.sequences, sequence) // HASH_BYTES + 1)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _bits(self, worker: WorkerKey, home: int) -> tuple[int, ...]:
        """The bits of a block that lies in `home` of the worker."""
        bits = self._holders.bits(worker)
        if home and bits:
            return self._holders.distinguish(worker, home, self._edges.root)[home:]
        return bits

    def _after_parent(self, worker: WorkerKey, bits: tuple[int, ...], parent: int | None) -> tuple[Edge, int]:
        """The edge and byte offset behind a block that the worker holds with these bits. Raises UnknownBlockError."""
        if parent is None:
            return self._edges.root, 0
        edge = self._edges.holding(parent)
        if bits and edge is not None:
            offset = find_hash(edge.sequences, parent.to_bytes(HASH_BYTES, "little"))
            if offset < edge.covered(bits[0]):
                return edge, offset + HASH_BYTES
        raise UnknownBlockError(worker, "stored behind", 1)

    def _remove_last(self, bits: tuple[int, ...], sequences: bytes, end: int, touched: dict[Edge, None]) -> int:
        """Removes the last block of a run up to `end`, and the blocks that precede it both in the run and in the tree.
        Returns how many bytes of the run are done; 0 when the worker does not hold that block."""
        last = sequences[end - HASH_BYTES : end]
        edge = self._edges.holding(int.from_bytes(last, "little"))
        if edge is None or not (covered := edge.covered(bits[-1])):
            return 0
        if edge.sequences.startswith(last, covered - HASH_BYTES):
            done = common_end(edge.sequences, covered, sequences, end)
            self._holders.uncover(edge, bits, covered - done, touched)
            return done
        offset = find_hash(edge.sequences, last)
        if offset >= covered:
            return 0
        self._holders.uncover(edge, bits, offset, touched)
        return HASH_BYTES

    def _move_first(
        self,
        bits: tuple[int, ...],
        home: int,
        sequences: bytes,
        position: int,
        climbing: bytes,
        touched: dict[Edge, None],
    ) -> int:
        """Moves the block at `position` of a run, and those that follow it in the run and, in the same direction, in
        the edge. `climbing`: the run in reverse order. Returns how many bytes of the run are done, 0 as apply_moved
        says."""
        first = sequences[position : position + HASH_BYTES]
        edge = self._edges.holding(int.from_bytes(first, "little"))
        if edge is None:
            return 0
        nearer = edge.covered(bits[home - 1]) if home else 0
        here, anywhere = edge.covered(bits[home]), edge.covered(bits[-1])
        if nearer and edge.sequences.startswith(first, nearer - HASH_BYTES):
            offset = nearer - HASH_BYTES
        elif edge.sequences.startswith(first, here):
            offset = here
        else:
            offset = find_hash(edge.sequences, first)
        if offset < nearer:
            done = common_end(edge.sequences, offset + HASH_BYTES, climbing, len(climbing) - position)
            self._holders.uncover(edge, bits[:home], offset + HASH_BYTES - done, touched)
            return done
        if offset < here:
            return HASH_BYTES
        assert edge.parent is not None, "the root has no blocks"
        if offset > here or offset >= anywhere or not (here or edge.parent.full >> bits[home] & 1):
            return 0
        done = common_bytes(edge.sequences[:anywhere], offset, sequences, position)
        self._holders.cover(edge, bits[home:-1], offset + done)
        touched[edge] = None
        return done


def _mask(bits: tuple[int, ...]) -> int:
    mask = 0
    for bit in bits:
        mask |= 1 << bit
    return mask
