"""Worker counts that an operator has set by hand. They override the policy and are stored in NATS."""

from typing import Final

import msgspec
import structlog

from baton_proto.decoding import decoder
from baton_proto.planner import Holds
from planner.acting.memory_store import MemoryStore

KEY: Final = "hand"

log = structlog.get_logger()


class Hand:
    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._holds = Holds()

    async def load(self) -> None:
        data = await self._store.load(KEY)
        try:
            self._holds = decoder(Holds, json=True)(data) if data else Holds()
        except msgspec.DecodeError as error:
            log.warning("what was set by hand cannot be read: the planner decides alone", error=str(error))

    def holds(self) -> Holds:
        return self._holds

    async def set(self, prefill: int | None, decode: int | None) -> None:
        """Sets the counts; None leaves a role to the planner. They hold from the next decision on. While NATS does
        not answer, they are in this process alone, and a restart loses them."""
        self._holds = Holds(prefill, decode)
        await self._store.save(KEY, msgspec.json.encode(self._holds))
