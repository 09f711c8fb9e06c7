"""Feeds the KV events of a vLLM engine to Baton's routers: `baton events bridge`.

The engine appears as a worker that is known by its events alone (see EventSource).
"""

import asyncio

from baton.events.event_source import EventSource
from engine.vllm.events.followed_cache import FollowedCache
from engine.vllm.events.stream import VllmStream
from runtime.end_task import end_tasks
from runtime.nats.client import NatsClient

KEYFRAME_S = 900.0  # well within the hour for which the stream remembers
REPORT_S = 30.0


class Bridge:
    def __init__(self, nats: NatsClient, stream: VllmStream, source: EventSource, block_size: int) -> None:
        self.cache = FollowedCache(block_size)
        self._stream = stream
        self._source = source
        nats.on_reconnect(self.keyframe)  # the server may have lost its storage

    async def run(self) -> None:
        """Runs until it is cancelled. Raises ConfigError when the engine's blocks have another size, ProtocolError when
        several engines speak at once, UnavailableError when NATS or the replay endpoint does not answer."""
        chores = asyncio.create_task(self._chores())
        try:
            async for item in self._stream.messages():
                if events := self.cache.take(item):
                    self._source.publish(events)
                self._source.num_blocks = self.cache.blocks.num_shown
        finally:
            await end_tasks(chores)

    def keyframe(self) -> None:
        self._source.keyframe(self.cache.blocks.runs())

    async def _chores(self) -> None:
        passed_s = 0.0
        while True:
            await asyncio.sleep(REPORT_S)
            passed_s += REPORT_S
            if passed_s >= KEYFRAME_S:
                passed_s = 0.0
                self.keyframe()
            self.cache.say_what_is_missing()
