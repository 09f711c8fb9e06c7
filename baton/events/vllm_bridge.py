"""Feeds the KV events of a vLLM engine to Baton's routers: `baton events bridge`.

The engine appears as a worker that is known by its events alone (see EventSource). Whenever its stream cannot be relied
on, its blocks are withdrawn: it is better for routers to know too little than something wrong.
"""

import asyncio

import structlog

from baton.events.event_source import EventSource
from baton_proto.kv_events import KvEvent
from runtime.end_task import end_tasks
from runtime.errors import ProtocolError
from runtime.kv_events.vllm.blocks import VllmBlocks
from runtime.kv_events.vllm.messages import decode_vllm_batch
from runtime.kv_events.vllm.stream import Lost, Message, VllmStream
from runtime.nats.client import NatsClient

KEYFRAME_S = 900.0  # well within the hour for which the stream remembers
REPORT_S = 30.0

log = structlog.get_logger()


class Bridge:
    """`num_messages` counts the messages that were read, `num_malformed` what could not be read."""

    def __init__(self, nats: NatsClient, stream: VllmStream, source: EventSource, block_size: int) -> None:
        self.num_messages = 0
        self.num_malformed = 0
        self.num_losses = 0
        self.blocks = VllmBlocks(block_size)
        self._stream = stream
        self._source = source
        self._rank: int | None = None
        self._reported_skips = 0
        self._first_problem = ""  # why the first message could not be read
        nats.on_reconnect(self.keyframe)  # the server may have lost its storage

    async def run(self) -> None:
        """Runs until it is cancelled. Raises ConfigError when the engine's blocks have another size, ProtocolError when
        several engines speak at once, UnavailableError when NATS or the replay endpoint does not answer."""
        chores = asyncio.create_task(self._chores())
        try:
            async for item in self._stream.messages():
                match item:
                    case Lost(reason):
                        self._lose(reason)
                    case Message():
                        self._pass_on(item)
        finally:
            await end_tasks(chores)

    def keyframe(self) -> None:
        self._source.keyframe(self.blocks.runs())

    def _pass_on(self, message: Message) -> None:
        try:
            batch = decode_vllm_batch(message.payload)
        except ProtocolError as error:
            self._unreadable(message, str(error))
            return
        self._check_rank(batch.data_parallel_rank)
        self.num_messages += 1
        events: list[KvEvent] = []
        for event in batch.events:
            try:
                events += self.blocks.apply(event)
            except ProtocolError as error:
                self.num_malformed += 1
                log.warning("event skipped", number=message.number, error=str(error))
        if events:
            self._source.publish(events)
        self._source.num_blocks = self.blocks.num_shown

    def _unreadable(self, message: Message, reason: str) -> None:
        """Says so at once when no message was ever read, because then nothing of the engine is ever found."""
        self.num_malformed += 1
        if self.num_messages:
            log.warning("message skipped", number=message.number, reason=reason)
        elif self.num_malformed == 1:
            self._first_problem = reason
            self._say_nothing_is_read()
        self._lose(reason)

    def _say_nothing_is_read(self) -> None:
        log.error(
            "no message of this engine can be read, so routers find none of its blocks",
            messages=self.num_malformed,
            first_reason=self._first_problem,
            way_out="is the endpoint vLLM's, and its version one of those that docs/events.md names?",
        )

    def _lose(self, reason: str) -> None:
        self.num_losses += 1
        num_shown, cleared = self.blocks.num_shown, self.blocks.clear()
        if num_shown:
            log.warning("all blocks of the engine are withdrawn", reason=reason, blocks=num_shown)
            self._source.publish(cleared)
        self._source.num_blocks = 0

    def _check_rank(self, rank: int | None) -> None:
        if rank is None or rank == self._rank:
            return
        if self._rank is not None:
            raise ProtocolError("vLLM", f"data parallel ranks {self._rank} and {rank} in one stream; bridge each alone")
        self._rank = rank

    async def _chores(self) -> None:
        passed_s = 0.0
        while True:
            await asyncio.sleep(REPORT_S)
            passed_s += REPORT_S
            if passed_s >= KEYFRAME_S:
                passed_s = 0.0
                self.keyframe()
            if self.num_malformed and not self.num_messages:
                self._say_nothing_is_read()
            skips = self.blocks.skipped.total()
            if skips > self._reported_skips:
                self._reported_skips = skips
                log.warning("blocks that routers will not find", **dict(self.blocks.skipped))
