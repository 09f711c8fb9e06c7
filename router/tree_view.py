"""The radix tree as people want to see it: `baton events tree`. Asked by grpc_admin.

A listing may be long and the router has requests to serve, so it is made in slices between which others have their
turn. The tree goes on changing meanwhile: a listing shows each run as it is when its turn comes.
"""

import asyncio
import heapq
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Final

from baton_proto.generated import inference_pb2 as pb
from router.block_index import NOWHERE
from router.edge import HASH_BYTES, Edge
from router.match import WorkerKey
from router.prefix_hits import PrefixHits
from router.radix_tree import RadixTree

SLICE_RUNS: Final = 256  # about 2 ms of work; also the runs of one message


class TreeView:
    def __init__(self, router_id: str, block_size: int, tree: RadixTree, hits: PrefixHits) -> None:
        self._router_id = router_id
        self._block_size = block_size
        self._tree = tree
        self._hits = hits

    async def listing(self, wanted: pb.TreeRequest) -> AsyncIterator[pb.TreeChunk]:
        through = await self._hits_through_runs()
        chunk = pb.TreeChunk(summary=self._summary(wanted.max_hottest))
        sent = 0
        # Depth first, so that what belongs together comes together. The last of the stack is the next.
        stack = [(edge, 0, 1, 0) for edge in self._first(self._tree.children(), through, wanted.max_children)]
        while stack and (not wanted.max_runs or sent < wanted.max_runs):
            edge, parent, depth, first_block = stack.pop()
            if edge.number == NOWHERE:  # it has left the tree since
                continue
            sent += 1
            children = self._tree.children(edge)
            chunk.runs.append(self._run(edge, sent, parent, depth, first_block, through[edge], len(children)))
            if not wanted.max_depth or depth < wanted.max_depth:
                behind = first_block + len(edge.blocks) // HASH_BYTES
                stack += [
                    (child, sent, depth + 1, behind) for child in self._first(children, through, wanted.max_children)
                ]
            if len(chunk.runs) == SLICE_RUNS:
                yield chunk
                chunk = pb.TreeChunk()
                await asyncio.sleep(0)
        yield chunk

    async def _hits_through_runs(self) -> Counter[Edge]:
        """Per edge: requests whose reused prefix ended in it or behind it."""
        through: Counter[Edge] = Counter()
        for i, (block, count) in enumerate(self._hits.counts().items()):
            if i % SLICE_RUNS == SLICE_RUNS - 1:
                await asyncio.sleep(0)
            place = self._tree.locate(block)
            edge = place[0] if place else None
            while edge is not None:
                through[edge] += count
                edge = edge.parent
        return through

    def _first(self, edges: list[Edge], through: Mapping[Edge, int], count: int) -> list[Edge]:
        """The most used ones, then the longest; the first one last, as a stack wants them."""

        def use(edge: Edge) -> tuple[int, int]:
            return through[edge], len(edge.blocks)

        return heapq.nlargest(count or len(edges), edges, key=use)[::-1]

    def _summary(self, max_hottest: int) -> pb.TreeSummary:
        tree = self._tree
        return pb.TreeSummary(
            router_id=self._router_id,
            block_size=self._block_size,
            blocks=tree.num_blocks,
            runs=tree.num_edges,
            workers=_owners({worker: tree.num_blocks_of(worker) for worker in tree.workers}),
            hottest=self._hottest(max_hottest),
            first_runs=len(tree.children()),
        )

    def _hottest(self, count: int) -> list[pb.HotPrefix]:
        known = (
            (hits, block, place) for block, hits in self._hits.counts().items() if (place := self._tree.locate(block))
        )
        return [
            pb.HotPrefix(
                last_hash=int.from_bytes(block, "little"),
                blocks=_blocks_before(edge) + end,
                hits=hits,
                owners=_owners({worker: held for worker, held in self._tree.owners(edge).items() if held >= end}),
            )
            for hits, block, (edge, end) in heapq.nlargest(count, known, key=lambda item: item[0])
        ]

    def _run(
        self, edge: Edge, number: int, parent: int, depth: int, first_block: int, hits: int, children: int
    ) -> pb.TreeRun:
        return pb.TreeRun(
            number=number,
            parent=parent,
            depth=depth,
            first_block=first_block,
            blocks=len(edge.blocks) // HASH_BYTES,
            first_hash=int.from_bytes(edge.sequences[:HASH_BYTES], "little"),
            owners=_owners(self._tree.owners(edge)),
            hits=hits,
            children=children,
        )


def _owners(blocks: Mapping[WorkerKey, int]) -> list[pb.TreeOwner]:
    """In the order of their ids."""
    return [
        pb.TreeOwner(worker_id=worker_id, incarnation=incarnation, blocks=held)
        for (worker_id, incarnation), held in sorted(blocks.items())
    ]


def _blocks_before(edge: Edge) -> int:
    length = 0
    while edge.parent is not None:
        edge = edge.parent
        length += len(edge.blocks)
    return length // HASH_BYTES
