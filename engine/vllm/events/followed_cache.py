"""The cache of one vLLM engine, as its stream of messages tells it: each message becomes events of ours.

Whenever the stream cannot be relied on, all blocks are withdrawn: it is better for routers to know too little than
something wrong.
"""

import structlog

from baton_proto.kv_events import KvEvent
from engine.vllm.events.blocks import MISFIT, SeedOf, VllmBlocks
from engine.vllm.events.messages import AllBlocksCleared, VllmBatch, decode_vllm_batch
from engine.vllm.events.stream import Lost, Message
from runtime.errors import ProtocolError

log = structlog.get_logger()


class FollowedCache:
    """`num_messages` counts the messages that were read, `num_malformed` what could not be read, `num_losses` how often
    all blocks were withdrawn."""

    def __init__(self, block_size: int, seed_of: SeedOf | None = None) -> None:
        self.num_messages = 0
        self.num_malformed = 0
        self.num_losses = 0
        self.blocks = VllmBlocks(block_size, seed_of)
        self._rank: int | None = None
        self._first_problem = ""  # why the first message could not be read
        self._reported_skips = 0
        self._is_forgotten = False  # until the engine says so itself

    def take(self, item: Message | Lost) -> list[KvEvent]:
        """What routers must be told. Raises ConfigError when the engine's blocks have another size, ProtocolError when
        several engines speak at once."""
        if isinstance(item, Lost):
            return self._lose(item.reason)
        try:
            batch = decode_vllm_batch(item.payload)
        except ProtocolError as error:
            return self._unreadable(item, str(error))
        self._check_rank(batch.data_parallel_rank)
        self.num_messages += 1
        return self._apply(item.number, batch)

    def forget(self) -> list[KvEvent]:
        """The engine has emptied its cache, and will say so with its next step. What it says before is of no use."""
        self._is_forgotten = True
        return self.blocks.clear()

    @property
    def note(self) -> str:
        """Why routers find less of the engine's cache than there is; empty when they find all of it."""
        blocks = self.blocks
        if self.num_malformed and not self.num_messages:
            return f"none of its KV events can be read: {self._first_problem}"
        if blocks.other_kinds and blocks.group is None:
            kinds = ", ".join(sorted(blocks.other_kinds))
            return f"its prefixes are not found: its KV events tell of {kinds} alone, not of full attention"
        if misfits := blocks.skipped[MISFIT]:
            return f"{misfits} of its KV blocks are not found: events have {MISFIT}"
        return ""

    def say_what_is_missing(self) -> None:
        """From time to time: logs what is not found by routers, when there is something new."""
        if self.num_malformed and not self.num_messages:
            self._say_nothing_is_read()
        skips = self.blocks.skipped.total()
        if skips > self._reported_skips:
            self._reported_skips = skips
            log.warning("blocks that routers will not find", **dict(self.blocks.skipped))

    def _apply(self, number: int, batch: VllmBatch) -> list[KvEvent]:
        told: list[KvEvent] = []
        for event in batch.events:
            if self._is_forgotten and not isinstance(event, AllBlocksCleared):
                continue
            self._is_forgotten = False
            try:
                told += self.blocks.apply(event)
            except ProtocolError as error:
                self.num_malformed += 1
                log.warning("event skipped", number=number, error=str(error))
        return told

    def _unreadable(self, message: Message, reason: str) -> list[KvEvent]:
        """Says so at once when no message was ever read, because then nothing of the engine is ever found."""
        self.num_malformed += 1
        if self.num_messages:
            log.warning("message skipped", number=message.number, reason=reason)
        elif self.num_malformed == 1:
            self._first_problem = reason
            self._say_nothing_is_read()
        return self._lose(reason)

    def _say_nothing_is_read(self) -> None:
        log.error(
            "no message of this engine can be read, so routers find none of its blocks",
            messages=self.num_malformed,
            first_reason=self._first_problem,
            way_out="is the endpoint vLLM's, and its version one of those that docs/operating.md names?",
        )

    def _lose(self, reason: str) -> list[KvEvent]:
        self.num_losses += 1
        self._is_forgotten = False
        num_shown, cleared = self.blocks.num_shown, self.blocks.clear()
        if not num_shown:
            return []
        log.warning("all blocks of the engine are withdrawn", reason=reason, blocks=num_shown)
        return cleared

    def _check_rank(self, rank: int | None) -> None:
        if rank is None or rank == self._rank:
            return
        if self._rank is not None:
            raise ProtocolError("vLLM", f"data parallel ranks {self._rank} and {rank} in one stream; follow each alone")
        self._rank = rank
