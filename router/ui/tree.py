"""The radix tree for the page: the most used part of it, made at most once in a few seconds for all who look."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final

from baton_proto.generated import inference_pb2 as pb
from router.views.tree_view import TreeView

AGE_S: Final = 2.0
OWNERS: Final = 16  # named with a run
WANTED: Final = pb.TreeRequest(max_depth=6, max_children=12, max_runs=250, max_hottest=8)


class TreePicture:
    def __init__(self, tree: TreeView) -> None:
        self._tree = tree
        self._made_s = -AGE_S
        self._picture: dict[str, Any] = {}
        self._making = asyncio.Lock()

    async def picture(self) -> dict[str, Any]:
        async with self._making:
            if time.monotonic() - self._made_s >= AGE_S:
                self._picture = await self._make()
                self._made_s = time.monotonic()
            return self._picture

    async def _make(self) -> dict[str, Any]:
        summary, runs = pb.TreeSummary(), []
        async for chunk in self._tree.listing(WANTED):
            if chunk.HasField("summary"):
                summary = chunk.summary
            runs += [_run(run) for run in chunk.runs]
        hottest = [
            {"hash": f"{one.last_hash:016x}", "blocks": one.blocks, "hits": one.hits, **_held(one.owners)}
            for one in summary.hottest
        ]
        return {"block_size": summary.block_size, "blocks": summary.blocks, "hottest": hottest, "runs": runs}


def _run(run: pb.TreeRun) -> dict[str, Any]:
    shown = {name: getattr(run, name) for name in ("number", "parent", "depth", "first_block", "blocks", "hits")}
    return shown | {"children": run.children, "hash": f"{run.first_hash:016x}", **_held(run.owners)}


def _held(owners: Sequence[pb.TreeOwner]) -> dict[str, Any]:
    """The owners that hold most of it, and how many there are."""
    most = sorted(owners, key=lambda owner: -owner.blocks)[:OWNERS]
    return {"owners": [(owner.worker_id, owner.blocks) for owner in most], "num_owners": len(owners)}
