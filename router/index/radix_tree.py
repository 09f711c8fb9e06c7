"""Which worker holds which prefix: a path-compressed tree over block hashes. No I/O and no clock here.

Workers' KV events change the tree; `find` answers with the block hashes of a prompt. Per edge, a worker covers nothing,
the whole run, or its first blocks: because a worker evicts leaves first, it always holds a prefix of every path. Full
coverage of an edge is one bit of a mask.
"""

from collections.abc import Iterator
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from baton_proto.kv_events import HASH_BYTES, Cleared, KvEvent, Removed, Stored
from router.index.block_index import NOWHERE
from router.index.edge import HASH, Edge, common_bytes, common_end, find_hash
from router.index.edge_table import EdgeTable
from router.index.match import Match, bits
from router.index.roster import Roster
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
        self._roster = Roster()  # a worker's number is its bit in masks
        self._held_bytes: list[int] = []  # by bit number: coverage, summed over edges

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that at least one worker holds."""
        return self._edges.num_blocks

    @property
    def num_edges(self) -> int:
        return self._edges.num_edges

    @property
    def workers(self) -> list[WorkerKey]:
        return list(self._roster)

    def num_blocks_of(self, worker: WorkerKey) -> int:
        bit = self._roster.get(worker)
        return 0 if bit is None else self._held_bytes[bit] // HASH_BYTES

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
        return Match(levels, alone, self._roster, edge.sequences, length)

    def apply(self, worker: WorkerKey, event: KvEvent) -> None:
        """Raises ProtocolError when the event contradicts the tree, see the methods below."""
        match event:
            case Stored():
                self.apply_stored(worker, event.parent, event.block_hashes, event.sequence_hashes)
            case Removed():
                self.apply_removed(worker, event.sequence_hashes)
            case Cleared():
                self.clear(worker)

    def apply_stored(self, worker: WorkerKey, parent: int | None, blocks: bytes, sequences: bytes) -> None:
        """The worker holds a run of blocks (u64 LE hashes), the first one being the child of the block `parent`.

        Raises UnknownBlockError when the worker does not hold the parent, ProtocolError when the hashes contradict
        the tree; the tree is unchanged then.
        """
        if len(blocks) != len(sequences) or len(blocks) % HASH_BYTES or not blocks:
            raise ProtocolError(f"worker {worker[0]}", "a stored run needs as many sequence as block hashes")
        edge, offset = self._after_parent(worker, parent)
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
        known = self._roster.get(worker)
        holder = 0 if known is None else 1 << known
        number = self._edges.enter(edge, offset, holder, new) if new else NOWHERE
        if new and number == NOWHERE:
            raise ProtocolError(f"worker {worker[0]}", "a stored run has sequence hashes that name other blocks")
        bit = self._register(worker)
        for passed in covered:
            self._held_bytes[bit] += passed.cover(bit, len(passed.blocks))
        self._held_bytes[bit] += edge.cover(bit, offset)
        if new:
            self._held_bytes[bit] += len(new)
            self._edges.attach(edge, offset, 1 << bit, blocks[position:], new, number)
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
        bit = self._roster.get(worker)
        if bit is None:
            raise UnknownBlockError(worker, "removed", num_hashes)
        touched: dict[Edge, None] = {}
        unknown = 0
        climbing = np.frombuffer(sequences, dtype=HASH)[::-1].tobytes()  # leaves last, the order of edges
        end = len(climbing)
        while end:
            gone = self._remove_last(bit, climbing, end, touched)
            if not gone:
                unknown, gone = unknown + 1, HASH_BYTES
            end -= gone
        self._edges.tidy(touched)
        if unknown:
            raise UnknownBlockError(worker, "removed", unknown)

    def clear(self, worker: WorkerKey) -> None:
        """The worker holds nothing any more."""
        bit = self._roster.get(worker)
        if bit is not None:
            touched: dict[Edge, None] = {}
            self._uncover_below(self._edges.root, bit, touched)
            self._edges.tidy(touched)

    def remove_worker(self, worker: WorkerKey) -> None:
        """Forgets the worker. Nothing happens when it is not known."""
        self.clear(worker)
        self._roster.discard(worker)

    def dump(self, worker: WorkerKey) -> Iterator[Stored]:
        """The worker's runs, parents before children. The tree must not change meanwhile."""
        bit = self._roster.get(worker)
        if bit is None:
            return
        stack = list((self._edges.root.children or {}).values())
        while stack:
            edge = stack.pop()
            covered = edge.covered(bit)
            if not covered:
                continue
            assert edge.parent is not None, "only the root has no parent"
            before = edge.parent.sequences[-HASH_BYTES:]
            parent = int.from_bytes(before, "little") if before else None
            yield Stored(parent, edge.blocks[:covered], edge.sequences[:covered])
            if covered == len(edge.blocks) and edge.children is not None:
                stack.extend(edge.children.values())

    def children(self, edge: Edge | None = None) -> list[Edge]:
        """The edges right behind an edge; None: those that start at token 0. Edges are valid until the tree changes."""
        return list(((edge or self._edges.root).children or {}).values())

    def owners(self, edge: Edge) -> dict[WorkerKey, int]:
        """How many blocks of an edge each worker holds; workers without any are left out."""
        held = dict.fromkeys(compress(self._roster.names, bits(edge.full).tobytes()), len(edge.blocks) // HASH_BYTES)
        for bit, covered in (edge.partial or {}).items():
            held[self._roster.names[bit]] = covered // HASH_BYTES
        return held

    def locate(self, sequence: bytes) -> tuple[Edge, int] | None:
        """The edge that holds a block (u64 LE sequence hash), and the number of the edge's blocks up to its end."""
        edge = self._edges.holding(int.from_bytes(sequence, "little"))
        return None if edge is None else (edge, find_hash(edge.sequences, sequence) // HASH_BYTES + 1)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _register(self, worker: WorkerKey) -> int:
        """The worker's bit number; a free one when the worker is new."""
        bit = self._roster.add(worker)
        if bit == len(self._held_bytes):
            self._held_bytes.append(0)
        return bit

    def _after_parent(self, worker: WorkerKey, parent: int | None) -> tuple[Edge, int]:
        """The edge and byte offset behind a block that the worker holds. Raises UnknownBlockError."""
        if parent is None:
            return self._edges.root, 0
        bit = self._roster.get(worker)
        edge = self._edges.holding(parent)
        if bit is not None and edge is not None:
            offset = find_hash(edge.sequences, parent.to_bytes(HASH_BYTES, "little"))
            if offset < edge.covered(bit):
                return edge, offset + HASH_BYTES
        raise UnknownBlockError(worker, "stored behind", 1)

    def _remove_last(self, bit: int, sequences: bytes, end: int, touched: dict[Edge, None]) -> int:
        """Removes the last block of a run up to `end`, and the blocks that precede it both in the run and in the tree.
        Returns how many bytes of the run are done; 0 when the worker does not hold that block."""
        last = sequences[end - HASH_BYTES : end]
        edge = self._edges.holding(int.from_bytes(last, "little"))
        if edge is None or not (covered := edge.covered(bit)):
            return 0
        if edge.sequences.startswith(last, covered - HASH_BYTES):
            done = common_end(edge.sequences, covered, sequences, end)
            self._uncover(edge, bit, covered - done, touched)
            return done
        offset = find_hash(edge.sequences, last)
        if offset >= covered:
            return 0
        self._uncover(edge, bit, offset, touched)
        return HASH_BYTES

    def _uncover(self, edge: Edge, bit: int, length: int, touched: dict[Edge, None]) -> None:
        """Lowers a worker's coverage and drops all that it holds behind. The structure is left to EdgeTable.tidy."""
        had_all = edge.full >> bit & 1
        self._held_bytes[bit] -= edge.uncover(bit, length)
        touched[edge] = None
        if had_all:
            self._uncover_below(edge, bit, touched)

    def _uncover_below(self, edge: Edge, bit: int, touched: dict[Edge, None]) -> None:
        stack = [edge]
        while stack:
            for child in (stack.pop().children or {}).values():
                if fell := child.uncover(bit, 0):
                    self._held_bytes[bit] -= fell
                    touched[child] = None
                    stack.append(child)
