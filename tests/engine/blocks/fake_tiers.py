"""Lower tiers of an oracle's dict, whose copies, reads and writes are done when a test says so."""

from collections.abc import Callable, MutableMapping, Sequence as Run
from functools import partial
from math import inf

from engine.blocks.disk_copies import DiskBlock, Done
from engine.sequences.moves import BEFORE_STEP, Move


class Slots:
    """A lower tier of the oracle's dict."""

    spare = 0
    block_s = 0.0

    def __init__(self, num_slots: int, content: MutableMapping[int, tuple[int, ...]]) -> None:
        self.num_slots = num_slots
        self.num_window_slots = 0
        self.first_place: float = inf  # blocks from here on are places
        self._content = content
        self._slots: dict[int, tuple[int, ...]] = {}

    def store(self, blocks: Run[int], slots: Run[int]) -> Move | None:
        assert len(set(slots)) == len(slots) == len(blocks)
        for block, slot in zip(blocks, slots, strict=True):
            assert 0 <= slot < self.num_slots + self.num_window_slots
            assert (slot >= self.num_slots) == (block >= self.first_place)
            self._slots[slot] = self._content[block]
        return None

    def load(self, slots: Run[int], blocks: Run[int]) -> Move | None:
        for slot, block in zip(slots, blocks, strict=True):
            assert (slot >= self.num_slots) == (block >= self.first_place)
            self._content[block] = self._slots[slot]
        return None

    def load_s(self, num_blocks: int) -> float:
        return 0.0

    def close(self) -> None:
        """Nothing to do."""

    def is_late(self, slot: int) -> bool:
        """Whether copies to or from it are still to be made."""
        return False

    def __getitem__(self, slot: int) -> tuple[int, ...]:
        return self._slots[slot]

    def __setitem__(self, slot: int, content: tuple[int, ...]) -> None:
        self._slots[slot] = content


class LateSlots(Slots):
    """Copies are made when somebody waits for them, or `work` is called; they are enqueued at once, or by `enqueue`
    when the tier is slow."""

    spare = 2

    def __init__(self, num_slots: int, content: MutableMapping[int, tuple[int, ...]], slow: bool = False) -> None:
        super().__init__(num_slots, content)
        self.moves: list[LateMove] = []
        self.enqueued: list[LateMove] = self.moves  # and not made
        if slow:
            self.enqueued = []

    def store(self, blocks: Run[int], slots: Run[int]) -> Move | None:
        return self._later(super().store, blocks, slots, slots)

    def load(self, slots: Run[int], blocks: Run[int]) -> Move | None:
        return self._later(super().load, slots, blocks, slots)

    def _later(self, copy: Callable[..., object], sources: Run[int], targets: Run[int], slots: Run[int]) -> Move:
        self.moves.append(LateMove(self, partial(copy, list(sources), list(targets)), frozenset(slots)))
        return self.moves[-1]

    def is_late(self, slot: int) -> bool:
        return any(slot in move.of for move in self.moves)

    def __getitem__(self, slot: int) -> tuple[int, ...]:
        self._await(slot)
        return super().__getitem__(slot)

    def __setitem__(self, slot: int, content: tuple[int, ...]) -> None:
        self._await(slot)
        super().__setitem__(slot, content)

    def _await(self, slot: int) -> None:
        while self.is_late(slot):
            self.work()

    def enqueue(self) -> None:
        self.enqueued.append(self.moves[len(self.enqueued)])

    def work(self) -> None:
        """Makes the oldest copies."""
        if not self.enqueued:
            self.enqueue()
        move = self.moves.pop(0)
        if self.enqueued is not self.moves:
            self.enqueued.pop(0)
        move.copy()


class LateMove:
    def __init__(self, slots: LateSlots, copy: Callable[[], object], of: frozenset[int]) -> None:
        self.copy = copy
        self.of = of  # slots
        self._slots = slots

    def is_enqueued(self) -> bool:
        return self in self._slots.enqueued or self not in self._slots.moves

    def left_s(self) -> float:
        return float(self in self._slots.moves)

    def before(self, layer: int) -> None:
        if layer == BEFORE_STEP:
            self.wait()

    def then(self, wake: Callable[[], object]) -> None:
        """Whoever works calls `land` afterwards."""

    def wait(self) -> None:
        while self in self._slots.moves:
            self._slots.work()


class Disk:
    """Files of the oracle's dict, which are read and written when `work` is called, and come to nothing if it says so.
    Invariant: nobody touches a host slot from the beginning of a read or write to its end. Copies of the slot that were
    asked for before are waited for at the end."""

    block_s = 0.0

    def __init__(self, num_slots: int, slots: Slots, num_window_slots: int = 0) -> None:
        self.num_slots, self.num_window_slots = num_slots, num_window_slots
        self.max_writes = 2
        self.num_errors = 0
        self.wake: Callable[[], object] = lambda: None
        self.late = False
        self.files: dict[int, tuple[DiskBlock, tuple[int, ...]]] = {}  # the last one is the youngest
        self._slots = slots
        self._writes: list[tuple[int, int, DiskBlock, tuple[int, ...] | None]] = []
        self._reads: list[tuple[int, int, DiskBlock, bool]] = []
        self._done: list[Done] = []

    def write(self, slot: int, copy: int, block: DiskBlock) -> None:
        assert 0 <= copy < self.num_slots + self.num_window_slots
        assert (slot >= self._slots.num_slots) == (copy >= self.num_slots)
        self._writes.append((slot, copy, block, None if self._slots.is_late(slot) else self._slots[slot]))

    def read(self, copy: int, slot: int, block: DiskBlock) -> None:
        assert (slot >= self._slots.num_slots) == (copy >= self.num_slots)
        if is_marked := not self._slots.is_late(slot):
            self._slots[slot] = (-1,)
        self._reads.append((copy, slot, block, is_marked))

    def done(self) -> list[Done]:
        done, self._done = self._done, []
        return done

    def read_s(self, num_blocks: int) -> float:
        return inf if self.late else 0.1

    def wipe(self) -> None:
        while self._writes:
            self.work(True, True)
        self.files.clear()

    def move(self, name: str) -> None:
        self.wipe()

    def close(self) -> None:
        self.finish()

    def work(self, writes: bool, ok: bool) -> None:
        """Ends the oldest write, or a read: these end in any order."""
        if writes and self._writes:
            slot, copy, block, before = self._writes.pop(0)
            content = self._slots[slot]
            assert before in (None, content), "a host slot was used while it was being written"
            self.files.pop(copy, None)
            if ok:
                self.files[copy] = block, content
            self._done.append(Done(copy, True, ok))
        elif not writes and self._reads:
            copy, slot, block, is_marked = self._reads.pop(-(len(self._reads) % 2))
            assert not is_marked or self._slots[slot] == (-1,), "a host slot was used while it was being read into"
            found, content = self.files.get(copy, (None, ()))
            assert found is None or found._replace(kind=0) == block._replace(kind=0)
            self._slots[slot] = content if ok and found else (-1,)
            self._done.append(Done(copy, False, ok and found is not None))

    def finish(self) -> bool:
        """Whether there was anything to do."""
        busy = bool(self._reads or self._writes)
        while self._reads or self._writes:
            self.work(not self._reads, True)
        return busy
