"""The radix tree, listed for people: `baton events tree`.

Because a listing may be long, it is made in slices, and other tasks of the router run between them. The tree may change
meanwhile: each run is shown as it is when the listing reaches it.
"""

import asyncio
import heapq
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from baton_proto.generated import inference_pb2 as pb
from baton_proto.kv_events import HASH_BYTES
from router.index.block_index import NOWHERE
from router.index.edge import Edge
from router.index.holders import Held
from router.index.prefix_hits import PrefixHits
from router.index.radix_tree import RadixTree
from runtime.discovery.worker_key import WorkerKey

SLICE_RUNS: Final = 256  # runs in one message: about 2 ms of work
SLICE_ITEMS: Final = 1024

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TreeView:
    router_id: str
    block_size: int
    tree: RadixTree
    hits: PrefixHits

    async def listing(self, wanted: pb.TreeRequest) -> AsyncIterator[pb.TreeChunk]:
        through = await self._hits_through_runs()
        chunk = pb.TreeChunk(summary=self._summary())
        chunk.summary.hottest.extend(await self._hottest(wanted.max_hottest))
        sent = 0
        # Depth first, so that children follow their parent; the top of the stack is listed next.
        first = await self._first(self.tree.children(), through, wanted.max_children)
        stack = [(edge, 0, 1, 0) for edge in first]
        while stack and (not wanted.max_runs or sent < wanted.max_runs):
            edge, parent, depth, first_block = stack.pop()
            if edge.number == NOWHERE:  # the edge has left the tree meanwhile
                continue
            sent += 1
            children = self.tree.children(edge)
            chunk.runs.append(self._run(edge, sent, parent, depth, first_block, through[edge], len(children)))
            if not wanted.max_depth or depth < wanted.max_depth:
                behind = first_block + len(edge.blocks) // HASH_BYTES
                following = await self._first(children, through, wanted.max_children)
                stack += [(child, sent, depth + 1, behind) for child in following]
            if len(chunk.runs) == SLICE_RUNS:
                yield chunk
                chunk = pb.TreeChunk()
                await asyncio.sleep(0)
        yield chunk

    async def _hits_through_runs(self) -> Counter[Edge]:
        """Per edge: how many requests reused a prefix that ended in the edge or below it."""
        through: Counter[Edge] = Counter()
        async for block, count in _in_slices(self.hits.counts().items()):
            place = self.tree.locate(block)
            edge = place[0] if place else None
            while edge is not None:
                through[edge] += count
                edge = edge.parent
        return through

    async def _first(self, edges: list[Edge], through: Mapping[Edge, int], count: int) -> list[Edge]:
        """The `count` most used edges (0: all), longer ones first among equals, in reverse order for the stack."""
        keyed = [(through[edge], len(edge.blocks), i) async for i, edge in _in_slices(enumerate(edges))]
        return [edges[i] for _, _, i in heapq.nlargest(count or len(edges), keyed)][::-1]

    def _summary(self) -> pb.TreeSummary:
        tree = self.tree
        return pb.TreeSummary(
            router_id=self.router_id,
            block_size=self.block_size,
            blocks=tree.num_blocks,
            runs=tree.num_edges,
            workers=_owners({worker: tree.held(worker) for worker in tree.workers}),
            first_runs=len(tree.children()),
        )

    async def _hottest(self, count: int) -> list[pb.HotPrefix]:
        known = [
            (hits, block) async for block, hits in _in_slices(self.hits.counts().items()) if self.tree.locate(block)
        ]
        return [
            self._hot_prefix(hits, block, *place)
            for hits, block in heapq.nlargest(count, known)
            if (place := self.tree.locate(block))
        ]

    def _hot_prefix(self, hits: int, block: bytes, edge: Edge, end: int) -> pb.HotPrefix:
        """The prefix that ends with block number `end` of an edge."""
        return pb.HotPrefix(
            last_hash=int.from_bytes(block, "little"),
            blocks=_blocks_before(edge) + end,
            hits=hits,
            owners=_owners({worker: held for worker, held in self.tree.owners(edge).items() if held.blocks >= end}),
        )

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
            owners=_owners(self.tree.owners(edge)),
            hits=hits,
            children=children,
        )


async def _in_slices(items: Iterable[T]) -> AsyncIterator[T]:
    """Yields the items, and lets other tasks run after every SLICE_ITEMS of them."""
    for i, item in enumerate(items, 1):
        yield item
        if i % SLICE_ITEMS == 0:
            await asyncio.sleep(0)


def _owners(owners: Mapping[WorkerKey, Held]) -> list[pb.TreeOwner]:
    """The owners, sorted by worker id."""
    return [
        pb.TreeOwner(
            worker_id=worker_id,
            incarnation=incarnation,
            blocks=held.blocks,
            host_blocks=held.host,
            disk_blocks=held.disk,
        )
        for (worker_id, incarnation), held in sorted(owners.items())
    ]


def _blocks_before(edge: Edge) -> int:
    length = 0
    while edge.parent is not None:
        edge = edge.parent
        length += len(edge.blocks)
    return length // HASH_BYTES
