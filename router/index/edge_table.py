"""The structure of the radix tree: its edges by number, the index from sequence hashes to them, splitting and joining.

A sequence hash names one block at one place, so the index has each hash once. An edge is copied when it is extended and
its shorter half's hashes are repointed when it is split or joined; therefore no edge grows beyond MAX_EXTENDED_BYTES.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np

from baton_proto.kv_events import HASH_BYTES
from router.index.block_index import NOWHERE, BlockIndex
from router.index.edge import HASH, Edge

MAX_EXTENDED_BYTES: Final = 4096 * HASH_BYTES
EVERYONE: Final = -1  # as a mask: all bits are set


class EdgeTable:
    def __init__(self) -> None:
        self.root = Edge(NOWHERE, None, b"", b"", EVERYONE)
        self._index = BlockIndex()
        self._edges: list[Edge | None] = [None]  # by number; NOWHERE is nobody's
        self._free_numbers: list[int] = []

    @property
    def num_blocks(self) -> int:
        return len(self._index)

    @property
    def num_edges(self) -> int:
        return len(self._edges) - 1 - len(self._free_numbers)

    def holding(self, sequence: int) -> Edge | None:
        """The edge with a block, by its sequence hash."""
        return self._edges[self._index.get(sequence)]

    def enter(self, edge: Edge, offset: int, holder: int, sequences: bytes) -> int:
        """Enters new blocks behind `offset` bytes of an edge into the index, which `attach` must follow. `holder`: mask
        of the worker. Returns the number of the edge that they will be in: a new one, unless they make `edge` longer.

        NOWHERE, and nothing has changed, when a hash is not new.
        """
        longer = offset == len(edge.blocks) < MAX_EXTENDED_BYTES and edge.full == holder and edge.children is None
        number = edge.number if longer else self._take_number()
        if self._index.insert(np.frombuffer(sequences, dtype=HASH), number):
            return number
        if not longer:
            self._free_numbers.append(number)
        return NOWHERE

    def attach(self, edge: Edge, offset: int, holder: int, blocks: bytes, sequences: bytes, number: int) -> None:
        """Puts entered blocks that only `holder` holds behind `offset` bytes of an edge that it covers so far."""
        if number == edge.number:
            edge.blocks += blocks
            edge.sequences += sequences
            return
        if offset < len(edge.blocks):
            self._split(edge, offset)
        self._edges[number] = Edge(number, edge, blocks, sequences, holder)

    def join(self, edge: Edge | None) -> None:
        """Joins an edge with its only child while the same workers cover both."""
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

    def tidy(self, touched: Iterable[Edge]) -> None:
        """Takes out the blocks that nobody holds any more, and joins edges that need not be apart."""
        gone = [self._cut(edge) for edge in touched if not edge.full]
        if gone:
            self._index.remove(np.frombuffer(b"".join(gone), dtype=HASH))
        for edge in touched:
            self.join(edge)
            self.join(edge.parent)

    def _split(self, edge: Edge, length: int) -> None:
        """The edge keeps its first `length` bytes, the rest becomes its only child."""
        blocks, sequences, children, partial = edge.blocks, edge.sequences, edge.children, edge.partial
        edge.blocks, edge.sequences = blocks[:length], sequences[:length]
        edge.children, edge.partial = None, None
        number = self._take_number()
        rest = self._edges[number] = Edge(number, edge, blocks[length:], sequences[length:], edge.full)
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

    def _cut(self, edge: Edge) -> bytes:
        """Shortens an edge that nobody covers to its end to what somebody covers. Returns the sequence hashes that
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
            edge.detach()
            self._free(edge)
        return gone

    def _take_number(self) -> int:
        if self._free_numbers:
            return self._free_numbers.pop()
        self._edges.append(None)
        return len(self._edges) - 1

    def _free(self, edge: Edge) -> None:
        self._edges[edge.number] = None
        self._free_numbers.append(edge.number)
        edge.number = NOWHERE

    def _exchange_numbers(self, a: Edge, b: Edge) -> None:
        a.number, b.number = b.number, a.number
        self._edges[a.number], self._edges[b.number] = a, b
