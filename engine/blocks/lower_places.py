"""The places of a lower tier: copies of what cached blocks hold in layers with a window.

A place is named by the sequence hash of its block, because it stays where it is while the block moves: wherever a
cached block lies, the tier may have this part of it or not. Invariant: a booked place is of a cached block.
"""

from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Iterator


class LowerPlaces:
    """The books. Engine thread only; O(1) per place."""

    def __init__(self, places: range) -> None:
        """places: ids of the tier, behind those of its slots."""
        self.all = places
        self.of: dict[int, int] = {}  # sequence hash -> place
        self._free = list(reversed(places))
        self._idle: OrderedDict[int, None] = OrderedDict()  # hashes whose places nobody uses, the oldest first
        self._users: Counter[int] = Counter()  # by place: copies on their way, and sequences that wait for them
        self._claimed: set[int] = set()  # that have an owner and no block yet

    def claim(self, *, must_be_free: bool = False) -> int | None:
        """A place for put() or give_back(): a free one, or that of the block that was used longest ago."""
        if self._free:
            place = self._free.pop()
        elif self._idle and not must_be_free:
            place = self.of.pop(self._idle.popitem(last=False)[0])
        else:
            return None
        self._claimed.add(place)
        return place

    def put(self, sequence_hash: int, place: int) -> None:
        """A claimed place is of this block, which has none, from now on."""
        self._claimed.remove(place)
        self.of[sequence_hash] = place
        self._idle[sequence_hash] = None

    def give_back(self, place: int) -> None:
        """A claimed place is for nobody."""
        self._claimed.remove(place)
        self._free.append(place)

    def hold(self, sequence_hash: int) -> int:
        """Returns the block's place, which is for no other block until let_go()."""
        place = self.of[sequence_hash]
        self._idle.pop(sequence_hash, None)
        self._users[place] += 1
        return place

    def let_go(self, sequence_hash: int, place: int) -> None:
        self._users[place] -= 1
        if self._users[place]:
            return
        del self._users[place]
        if self.of.get(sequence_hash) == place:
            self._idle[sequence_hash] = None
        else:  # the block was forgotten meanwhile
            self._free.append(place)

    def drop(self, sequence_hash: int) -> None:
        """The block loses its place, if it has one."""
        place = self.of.pop(sequence_hash, None)
        if place is None:
            return
        self._idle.pop(sequence_hash, None)
        if place not in self._users:
            self._free.append(place)

    def adopt(self, found: Iterable[tuple[int, int]]) -> None:
        """Takes in (sequence hash, place), the youngest first. Called when there are no others."""
        for sequence_hash, place in found:
            self.of.setdefault(sequence_hash, place)
        self._idle.update(dict.fromkeys(reversed(self.of)))
        taken = set(self.of.values())
        self._free = [place for place in self._free if place not in taken]

    def clear(self) -> None:
        for sequence_hash in list(self.of):
            self.drop(sequence_hash)

    def check_integrity(self, cached: Container[int]) -> Iterator[str]:
        """What is wrong with the books, in sentences. cached: sequence hashes."""
        used = {*self.of.values(), *self._users, *self._claimed}
        if len({*self.of.values(), *self._claimed}) < len(self.of) + len(self._claimed):
            yield "a place of a lower tier is of two blocks"
        if sorted([*self._free, *used]) != list(self.all):
            yield "the places of a lower tier are not those that are free, of a block or being used"
        if self._idle.keys() != {one for one, place in self.of.items() if place not in self._users}:
            yield "a place of a lower tier is neither idle nor used, or both"
        if not all(one in cached for one in self.of):
            yield "a place of a lower tier is of a block that is not cached"
