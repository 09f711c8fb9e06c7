"""The requests that a worker has not finished yet, and the moment when there are none."""

import asyncio
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from runtime.within import happens

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class InFlight(Generic[K, V]):
    """A dict that can be awaited to become empty. Event loop only."""

    def __init__(self) -> None:
        self._items: dict[K, V] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def add(self, key: K, value: V) -> None:
        assert key not in self._items, f"{key} is in flight already"
        self._items[key] = value
        self._empty.clear()

    def get(self, key: K) -> V | None:
        return self._items.get(key)

    def discard(self, key: K) -> None:
        self._items.pop(key, None)
        if not self._items:
            self._empty.set()

    def __contains__(self, key: K) -> bool:
        return key in self._items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[V]:
        """Iterates over a copy: the caller may discard meanwhile."""
        return iter(list(self._items.values()))

    async def wait_empty(self, timeout_s: float) -> int:
        """Returns 0 as soon as the last one is gone, or how many are left when the time is up."""
        return 0 if await happens(self._empty, timeout_s) else len(self._items)
