"""Which worker holds which prefix: a path-compressed tree over block hashes.

The indexer applies the workers' KV events; placement asks `find` with the block hashes of a prompt. An edge is a run
of blocks that is compared with the query in one step. Per edge, a worker covers nothing, the whole run, or its first
blocks: a worker evicts leaves first, so what it holds is always a prefix of every path, and full coverage of an edge
is one bit of a mask. No I/O and no clock here.
"""

from collections.abc import Iterator
from itertools import compress
from typing import Final

import numpy as np
from numpy.typing import NDArray

from baton_proto.kv_events import Stored
from router.index.block_index import NOWHERE, BlockIndex
from router.index.edge import HASH, HASH_BYTES, Edge, common_bytes, common_end, find_hash
from router.index.match import Match, bits
from router.index.roster import Roster
from runtime.discovery.worker_key import WorkerKey
from runtime.errors import ProtocolError

MAX_EXTENDED_BYTES: Final = 4096 * HASH_BYTES  # an edge is copied when it is extended, so it is not extended for ever
EVERYONE: Final = -1  # as a mask: all bits are set


class UnknownBlockError(ProtocolError):
    """An event names blocks that its worker does not hold, as far as the tree knows."""

    def __init__(self, worker: WorkerKey, what: str, count: int) -> None:
        self.count = count
        super().__init__(f"worker {worker[0]}", f"{what}: {count} block(s) that it does not hold")


class RadixTree:
    def __init__(self) -> None:
        self._root = Edge(NOWHERE, None, b"", b"", EVERYONE)
        self._index = BlockIndex()
        self._edges: list[Edge | None] = [None]  # by number; NOWHERE is nobody's
        self._free_numbers: list[int] = []
        self._roster = Roster()  # a worker's number is its bit in masks
        self._held_bytes: list[int] = []  # by bit number: coverage, summed over edges

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that at least one worker holds."""
        return len(self._index)

    @property
    def num_edges(self) -> int:
        return len(self._edges) - 1 - len(self._free_numbers)

    @property
    def workers(self) -> list[WorkerKey]:
        return list(self._roster)

    def num_blocks_of(self, worker: WorkerKey) -> int:
        bit = self._roster.get(worker)
        return 0 if bit is None else self._held_bytes[bit] // HASH_BYTES

    def find(self, block_hashes: NDArray[np.uint64]) -> Match:
        """Longest cached prefix per worker of a prompt's block hashes [num_blocks]."""
        query = block_hashes.tobytes()
        edge, position, length = self._root, 0, 0
        levels: list[tuple[int, int]] = []
        alone: list[tuple[int, int]] = []
        while edge.children is not None:
            child = edge.children.get(query[position : position + HASH_BYTES])
            if child is None:
                break
            length = len(child.blocks)
            if not query.startswith(child.blocks, position):
                length = common_bytes(child.blocks, 0, query, position)
            ended = edge.full & ~child.full if position else 0  # they go no further than the edge before
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
        number = self._enter(worker, edge, offset, new) if new else NOWHERE
        bit = self._register(worker)
        for passed in covered:
            self._held_bytes[bit] += passed.cover(bit, len(passed.blocks))
        self._held_bytes[bit] += edge.cover(bit, offset)
        if new:
            self._held_bytes[bit] += len(new)
            self._attach(edge, offset, bit, blocks[position:], new, number)
        first = covered[0] if covered else edge
        for joinable in (first.parent, *covered, edge):
            self._absorb_children(joinable)

    def apply_removed(self, worker: WorkerKey, sequences: bytes) -> None:
        """The worker dropped blocks (u64 LE sequence hashes); whatever followed one of them is gone with it.

        Raises UnknownBlockError after removing the others when the worker does not hold some of them.
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
        climbing = np.frombuffer(sequences, dtype=HASH)[::-1].tobytes()  # leaves last, as edges have them
        end = len(climbing)
        while end:
            gone = self._remove_last(bit, climbing, end, touched)
            if not gone:
                unknown, gone = unknown + 1, HASH_BYTES
            end -= gone
        self._tidy(touched)
        if unknown:
            raise UnknownBlockError(worker, "removed", unknown)

    def clear(self, worker: WorkerKey) -> None:
        """The worker holds nothing any more."""
        bit = self._roster.get(worker)
        if bit is not None:
            touched: dict[Edge, None] = {}
            self._uncover_below(self._root, bit, touched)
            self._tidy(touched)

    def remove_worker(self, worker: WorkerKey) -> None:
        """Forgets the worker. Nothing happens when it is not known."""
        self.clear(worker)
        self._roster.discard(worker)

    def dump(self, worker: WorkerKey) -> Iterator[Stored]:
        """What the worker holds, parents before children. The tree must not change meanwhile."""
        bit = self._roster.get(worker)
        if bit is None:
            return
        stack = list((self._root.children or {}).values())
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
        """The runs right behind an edge; None: those that start at token 0. Edges live until the tree changes."""
        return list(((edge or self._root).children or {}).values())

    def owners(self, edge: Edge) -> dict[WorkerKey, int]:
        """How many blocks of an edge each worker holds; those without any are left out."""
        held = dict.fromkeys(compress(self._roster.names, bits(edge.full).tobytes()), len(edge.blocks) // HASH_BYTES)
        for bit, covered in (edge.partial or {}).items():
            held[self._roster.names[bit]] = covered // HASH_BYTES
        return held

    def locate(self, sequence: bytes) -> tuple[Edge, int] | None:
        """The edge that holds a block (u64 LE sequence hash), and the number of the edge's blocks up to its end."""
        edge = self._edges[self._index.get(int.from_bytes(sequence, "little"))]
        return None if edge is None else (edge, find_hash(edge.sequences, sequence) // HASH_BYTES + 1)

    # --- who and where ------------------------------------------------------------------------------------------------

    def _register(self, worker: WorkerKey) -> int:
        """The worker's bit number; a free one when it is new."""
        bit = self._roster.add(worker)
        if bit == len(self._held_bytes):
            self._held_bytes.append(0)
        return bit

    def _after_parent(self, worker: WorkerKey, parent: int | None) -> tuple[Edge, int]:
        """The place behind a block that the worker holds. Raises UnknownBlockError."""
        if parent is None:
            return self._root, 0
        bit = self._roster.get(worker)
        edge = self._edges[self._index.get(parent)]
        if bit is not None and edge is not None:
            offset = find_hash(edge.sequences, parent.to_bytes(HASH_BYTES, "little"))
            if offset < edge.covered(bit):
                return edge, offset + HASH_BYTES
        raise UnknownBlockError(worker, "stored behind", 1)

    def _enter(self, worker: WorkerKey, edge: Edge, offset: int, sequences: bytes) -> int:
        """Enters new blocks behind `offset` bytes of an edge into the index. Returns the number of the edge that they
        will be in: a new one, unless they just make this edge longer.

        Raises ProtocolError, and has changed nothing, when a hash is not new: it names one block at one place.
        """
        bit = self._roster.get(worker)
        longer = (
            bit is not None
            and offset == len(edge.blocks) < MAX_EXTENDED_BYTES
            and edge.full == 1 << bit
            and edge.children is None
        )
        number = edge.number if longer else self._take_number()
        if not self._index.insert(np.frombuffer(sequences, dtype=HASH), number):
            if not longer:
                self._free_numbers.append(number)
            raise ProtocolError(f"worker {worker[0]}", "a stored run has sequence hashes that name other blocks")
        return number

    def _take_number(self) -> int:
        if self._free_numbers:
            return self._free_numbers.pop()
        self._edges.append(None)
        return len(self._edges) - 1

    # --- structure ----------------------------------------------------------------------------------------------------

    def _attach(self, edge: Edge, offset: int, bit: int, blocks: bytes, sequences: bytes, number: int) -> None:
        """New blocks that only this worker holds, behind `offset` bytes of an edge that it covers so far."""
        if number == edge.number:
            edge.blocks += blocks
            edge.sequences += sequences
            return
        if offset < len(edge.blocks):
            self._split(edge, offset)
        self._new_edge(number, edge, blocks, sequences, 1 << bit)

    def _new_edge(self, number: int, parent: Edge, blocks: bytes, sequences: bytes, full: int) -> Edge:
        edge = self._edges[number] = Edge(number, parent, blocks, sequences, full)
        if parent.children is None:
            parent.children = {}
        parent.children[blocks[:HASH_BYTES]] = edge
        return edge

    def _split(self, edge: Edge, length: int) -> None:
        """The edge keeps its first `length` bytes, the rest becomes its only child."""
        blocks, sequences, children, partial = edge.blocks, edge.sequences, edge.children, edge.partial
        edge.blocks, edge.sequences = blocks[:length], sequences[:length]
        edge.children, edge.partial = None, None
        rest = self._new_edge(self._take_number(), edge, blocks[length:], sequences[length:], edge.full)
        rest.children = children
        for child in (children or {}).values():
            child.parent = rest
        for bit, covered in (partial or {}).items():
            edge.cover(bit, min(covered, length))
            rest.cover(bit, max(covered - length, 0))
        shorter = rest
        if len(edge.blocks) < len(rest.blocks):
            self._exchange_numbers(edge, rest)
            shorter = edge
        self._index.repoint(np.frombuffer(shorter.sequences, dtype=HASH), shorter.number)

    def _absorb_children(self, edge: Edge | None) -> None:
        """Joins an edge with its only child while the same workers cover both: the run is broken for nothing."""
        if edge is None or edge.number == NOWHERE:  # the root has no number either
            return
        while edge.children is not None and len(edge.children) == 1:
            (child,) = edge.children.values()
            if child.full != edge.full or len(edge.blocks) + len(child.blocks) > MAX_EXTENDED_BYTES:
                return
            assert child.partial is None, "whoever covers part of a child covers all of its parent"
            shorter = child
            if len(edge.blocks) < len(child.blocks):
                self._exchange_numbers(edge, child)
                shorter = edge
            self._index.repoint(np.frombuffer(shorter.sequences, dtype=HASH), edge.number)
            edge.blocks += child.blocks
            edge.sequences += child.sequences
            edge.children = child.children
            for grandchild in (edge.children or {}).values():
                grandchild.parent = edge
            self._free(child)

    def _remove_last(self, bit: int, sequences: bytes, end: int, touched: dict[Edge, None]) -> int:
        """Removes the last block of a run up to `end`, and with it what precedes it both there and in the tree. Returns
        how many bytes of the run are done; 0 when the worker does not hold that block."""
        last = sequences[end - HASH_BYTES : end]
        edge = self._edges[self._index.get(int.from_bytes(last, "little"))]
        covered = edge.covered(bit) if edge is not None else 0
        if edge is None or not covered:
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
        """Lowers a worker's coverage and drops all that it holds behind it. Structure is left to `_tidy`."""
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

    def _tidy(self, touched: dict[Edge, None]) -> None:
        """Takes out the blocks that nobody holds any more and joins what need not be apart."""
        gone = [self._cut(edge) for edge in touched if not edge.full]
        if gone:
            self._index.remove(np.frombuffer(b"".join(gone), dtype=HASH))
        for edge in touched:
            self._absorb_children(edge)
            self._absorb_children(edge.parent)

    def _cut(self, edge: Edge) -> bytes:
        """Shortens an edge, that nobody covers to its end, to what somebody covers. Returns the sequence hashes that
        went. Its children are uncovered too and go by themselves."""
        keep = max(edge.partial.values()) if edge.partial else 0
        gone = edge.sequences[keep:]
        if keep:
            assert edge.partial is not None
            edge.blocks, edge.sequences = edge.blocks[:keep], edge.sequences[:keep]
            for bit in [bit for bit, covered in edge.partial.items() if covered == keep]:
                edge.full |= 1 << bit
                del edge.partial[bit]
            edge.partial = edge.partial or None
        else:
            assert edge.parent is not None
            assert edge.parent.children is not None
            del edge.parent.children[edge.blocks[:HASH_BYTES]]
            edge.parent.children = edge.parent.children or None
            self._free(edge)
        return gone

    def _free(self, edge: Edge) -> None:
        self._edges[edge.number] = None
        self._free_numbers.append(edge.number)
        edge.number = NOWHERE

    def _exchange_numbers(self, a: Edge, b: Edge) -> None:
        a.number, b.number = b.number, a.number
        self._edges[a.number], self._edges[b.number] = a, b
