"""A router's tree that is fed by an engine's stream of messages alone."""

import asyncio
from collections.abc import Callable

import numpy as np

from engine.vllm.events.followed_cache import FollowedCache
from engine.vllm.events.stream import VllmStream
from router.index.radix_tree import RadixTree
from runtime.blocks.block_hash import block_hashes, sequence_hashes
from runtime.end_task import end_tasks

KEY = ("vllm", 1)


class Follower:
    def __init__(self, endpoint: str, replay_endpoint: str, block_size: int, timeout_s: float = 5) -> None:
        self.stream = VllmStream(endpoint, replay_endpoint, timeout_s)
        self.cache = FollowedCache(block_size)
        self.tree = RadixTree()
        self.running: asyncio.Task[None] | None = None
        self._block_size = block_size

    def start(self) -> None:
        """The stream is open."""
        self.running = asyncio.create_task(self._run())

    def found(self, token_ids: list[int]) -> int:
        """Leading blocks of a prompt that a router finds."""
        table = b"".join(run.sequence_hashes for run in self.tree.dump(KEY))
        held = set(np.frombuffer(table, dtype="<u8").tolist())
        wanted = sequence_hashes(block_hashes(np.array(token_ids, dtype=np.uint32), self._block_size)).tolist()
        return next((count for count, name in enumerate(wanted) if name not in held), len(wanted))

    async def until(self, condition: Callable[[], bool], timeout_s: float = 60) -> None:
        assert self.running is not None
        async with asyncio.timeout(timeout_s):
            while not condition():
                if self.running.done():
                    self.running.result()
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        if self.running is not None:
            await end_tasks(self.running)
        await self.stream.close()

    async def _run(self) -> None:
        async for item in self.stream.messages():
            for event in self.cache.take(item):
                self.tree.apply(KEY, event)
