"""A vLLM server's prefix cache, as its events tell it, and what of a prompt is in it."""

from collections.abc import Sequence

import numpy as np

from baton_proto.kv_events import KvEvent, Removed, Stored
from engine.vllm.cache import VllmCache
from engine.vllm.events.stream import Lost, Message
from engine.vllm.server.told_blocks import ToldBlocks


class ExternalCache(VllmCache):
    """Event loop only."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        super().__init__(block_size, num_blocks)
        self.held: set[int] = set()  # sequence hashes
        self.told = ToldBlocks(self.held)

    def take(self, item: Message | Lost) -> list[KvEvent]:
        events = super().take(item)
        for event in events:
            match event:
                case Stored():
                    self.held.update(_hashes(event.sequence_hashes))
                case Removed():
                    self.held.difference_update(_hashes(event.sequence_hashes))
                case _:
                    self.held.clear()
        return events

    @property
    def note(self) -> str:
        return super().note or self.told.note

    def num_held(self, sequence_hashes: Sequence[int]) -> int:
        """How many leading blocks of a prompt are cached, by their names."""
        blocks = 0
        while blocks < len(sequence_hashes) and sequence_hashes[blocks] in self.held:
            blocks += 1
        return blocks


def _hashes(data: bytes) -> list[int]:
    hashes: list[int] = np.frombuffer(data, dtype="<u8").tolist()
    return hashes
