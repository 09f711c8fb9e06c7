"""The host tier of a worker on a GPU: pinned memory, and copies that go on while the GPU computes.

The copy engines do the work: a kernel that reads or writes host memory reaches the same 52 GB/s, but slows the steps
beside it by 10 to 100 % (H200). A copy of many blocks is made layer by layer, with an event each: a step that restores
a prefix computes its first layer while the others are still on their way.

Enqueuing 36,000 copies, a prefix of 32k tokens and what makes room for it, takes the driver 25 ms. A thread does that,
in the order of the calls. Invariant: only that thread touches the streams; the books are the engine thread's.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from engine.sequences.moves import BEFORE_STEP
from engine.tiers.slot_layout import Rows, SlotLayout
from kvtransfer.slab.slab import Slab
from runtime.device.pinned_memory import PinnedMemory

if TYPE_CHECKING:
    from runtime.device.cuda_memory import CudaMemory

SPARE = 32  # blocks of the device that are empty ahead of need: what some hundred decodes take in eight steps
_GROUP_BYTES = 32 << 20  # copies between two events, at least: 0.6 ms
_CALL_COPIES = 512  # by one call of the driver, at most: a step's launches wait for it, 0.4 ms
_PROBE_BYTES = 64 << 20


class _Lane:
    """A stream of copies in one direction, and how far it is. `ends`: bytes enqueued up to each event."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.asked = 0
        self._enqueued = 0
        self._done = 0
        self._ends: deque[tuple[torch.cuda.Event, int]] = deque()

    def end(self, nbytes: int) -> torch.cuda.Event:
        """Marks the end of copies that were enqueued. On the thread that enqueues."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        self._enqueued += nbytes
        self._ends.append((event, self._enqueued))
        return event

    def left(self, asked: int) -> int:
        """Bytes that are to be copied until that much is done."""
        while self._ends and self._ends[0][0].query():  # type: ignore[no-untyped-call]
            self._done = self._ends.popleft()[1]
        return max(0, asked - self._done)


class GpuMove:
    """Implements `engine.sequences.moves.Move`. `events[i]` ends the copies of layers [i * step, (i + 1) * step); they
    are all there when `enqueued` is done."""

    def __init__(self, tier: "GpuHostKv", lane: _Lane, step: int, by_layer: bool) -> None:
        self.events: list[torch.cuda.Event] = []
        self.enqueued: Future[None]
        self.step = step
        self._tier = tier
        self.lane = lane
        self._by_layer = by_layer
        self._asked = lane.asked
        self._is_watched = False

    def is_enqueued(self) -> bool:
        return self.enqueued.done() and self.enqueued.result() is None

    def left_s(self) -> float:
        self.is_enqueued()  # a later move's end would hide that this one failed
        return self.lane.left(self._asked) / self._tier.bytes_per_s

    def before(self, layer: int) -> None:
        if layer == BEFORE_STEP:
            self.enqueued.result()
        if not self._by_layer:
            if layer == BEFORE_STEP:
                torch.cuda.current_stream().wait_event(self.events[-1])
        elif layer >= 0 and layer % self.step == 0:
            torch.cuda.current_stream().wait_event(self.events[layer // self.step])

    def then(self, wake: Callable[[], object]) -> None:
        if not self._is_watched:
            self._is_watched = True
            self._tier.watcher.submit(self._wait_and, wake)

    def _wait_and(self, wake: Callable[[], object]) -> None:
        try:
            self.wait()
        finally:
            wake()  # what it finds may be that the move has failed

    def wait(self) -> None:
        self.enqueued.result()
        self._tier.enter()
        self.events[-1].synchronize()


class GpuHostKv:
    """Implements `engine.tiers.host_kv.HostTier` for a slab in GPU memory. Owned by the engine thread."""

    def __init__(self, slab: Slab, nbytes: int) -> None:
        """nbytes: of host memory, in whole blocks. Raises UnavailableError when there is not that much."""
        assert slab.driver.kind == "cuda"
        self._slots = layout = SlotLayout(slab.layout, nbytes)
        self._layout = slab.layout
        self._driver = cast("CudaMemory", slab.driver)
        self.enter = self._driver.enter
        self.slot_bytes, self.window_slot_bytes = layout.slot_bytes, layout.window_slot_bytes
        self.num_slots, self.num_window_slots = layout.num_slots, layout.num_window_slots
        self.spare = min(SPARE, slab.layout.num_blocks // 32)
        self._memory = PinnedMemory(self._driver, max(1, layout.num_rows) * layout.block_bytes)
        self._device = slab.flat.data_ptr()
        self._down, self._up = _Lane(self._driver.device), _Lane(self._driver.device)
        self._of_block: dict[int, GpuMove] = {}  # the last one of each
        self._of_slot: dict[int, GpuMove] = {}
        self._enqueuer = ThreadPoolExecutor(1, "kv copies")
        self.watcher = ThreadPoolExecutor(1, "kv moves")  # their threads begin with the first call
        self.bytes_per_s = 1.0
        self.bytes_per_s = self._measured()

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> GpuMove:
        return self._copy(self._down, blocks, slots)

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> GpuMove:
        return self._copy(self._up, blocks, slots)

    @property
    def block_s(self) -> float:
        return self.slot_bytes / self.bytes_per_s

    def load_s(self, num_blocks: int) -> float:
        return (self._up.left(self._up.asked) + num_blocks * self.slot_bytes) / self.bytes_per_s

    def content(self, slot: int) -> memoryview:
        if move := self._of_slot.get(slot):
            move.wait()
        rows, size = self._slots.host_rows(slot), self._slots.block_bytes
        return self._memory.array[rows.start * size : rows.stop * size].data

    def close(self) -> None:
        self._enqueuer.shutdown()
        self.watcher.shutdown()
        self._of_block.clear()
        self._of_slot.clear()
        self._memory.close()

    def _copy(self, lane: _Lane, blocks: Sequence[int], slots: Sequence[int]) -> GpuMove:
        layout, upwards = self._layout, lane is self._up
        step = min(layout.num_layers, max(1, -(-_GROUP_BYTES // (len(blocks) * layout.block_bytes))))
        ids = np.array(blocks, np.int64), np.array(slots, np.int64)
        lane.asked += self._slots.nbytes_of(ids[1])
        move = GpuMove(self, lane, step, upwards)
        # Because one stream keeps its order, only copies in the other direction need be waited for.
        touched = [self._of_block.get(block) for block in blocks] + [self._of_slot.get(slot) for slot in slots]
        earlier = [one for one in dict.fromkeys(touched) if one and one.lane is not lane and one.left_s()]
        begun = None
        if upwards and (ids[1] >= self.num_slots).any():  # steps on their way may read the places
            begun = torch.cuda.Event()  # type: ignore[no-untyped-call]
            begun.record(torch.cuda.current_stream())
        move.enqueued = self._enqueuer.submit(self._enqueue, move, *ids, earlier, begun)
        self._of_block.update(dict.fromkeys(blocks, move))
        self._of_slot.update(dict.fromkeys(slots, move))
        return move

    def _enqueue(
        self, move: GpuMove, blocks: Rows, slots: Rows, earlier: list[GpuMove], begun: torch.cuda.Event | None
    ) -> None:
        layout, lane = self._layout, move.lane
        if begun is not None:
            lane.stream.wait_event(begun)
        for first in range(0, layout.num_layers, move.step):
            layers = range(first, min(layout.num_layers, first + move.step))
            for one in earlier:
                lane.stream.wait_event(one.events[layers[-1] // one.step])
            in_slab, in_host = self._slots.rows(blocks, slots, layers)
            device, host = (
                self._device + in_slab * layout.block_bytes,
                self._memory.address + in_host * layout.block_bytes,
            )
            to, of = (one.astype(np.uint64) for one in ((device, host) if lane is self._up else (host, device)))
            for begin in range(0, len(to), _CALL_COPIES):
                some = slice(begin, begin + _CALL_COPIES)
                self._driver.copy(to[some], of[some], layout.block_bytes, lane.stream.cuda_stream)
            move.events.append(lane.end(len(to) * layout.block_bytes))

    def _measured(self) -> float:
        """Bytes per second of the link, from the host to the device. The slab holds nothing yet."""
        whole = min(self.num_slots, self._layout.num_blocks), self.slot_bytes
        window = min(self.num_window_slots, self._layout.num_window_blocks), self.window_slot_bytes
        is_window = prod(window) > prod(whole)
        probed, (count, nbytes) = self._slots.groups[is_window], window if is_window else whole
        if not count * nbytes:
            return 1.0
        count = min(count, max(1, _PROBE_BYTES // nbytes))
        slots, took_ms = range(probed.first_slot, probed.first_slot + count), 1.0
        blocks = range(probed.first_block, probed.first_block + count)
        for _ in range(2):  # the first one wakes the link up
            before = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            after = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._enqueuer.submit(before.record, self._up.stream)
            self.load(slots, blocks)
            self._enqueuer.submit(after.record, self._up.stream).result()
            after.synchronize()
            took_ms = before.elapsed_time(after)
        self._of_block.clear()
        self._of_slot.clear()
        return float(count * nbytes / max(took_ms, 1e-3) * 1e3)
